"""Meshes: what is cut, what moves, what is summed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from agentic_rl import numerics
from agentic_rl.learner import inputs as inputs_lib
from agentic_rl.learner import optimizer as optimizer_lib
from agentic_rl.learner import pack as pack_lib
from agentic_rl.learner import update
from agentic_rl.parallel import mesh
from agentic_rl.policy import forward as forward_lib
from agentic_rl.policy import model
from agentic_rl.rollout import engine as engine_lib
from kernels_pallas import numerics as nx
from tests.rollout import samples

OWN = PartitionSpec(mesh.AXES)


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('', (1, 1, 1, 1)),
        ('data=2', (2, 1, 1, 1)),
        ('context=4, fsdp=2', (1, 2, 1, 4)),
    ],
)
def test_a_mesh_is_read(text, expected):
  assert tuple(mesh.parse(text).values()) == expected


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        ('model=2', "'model=2' is not allowed; each of ['data', 'fsdp'"),
        ('data', "'data' is not allowed"),
        ('data=2,data=2', 'may be given once'),
        ('data=0', "data must be a number of devices, not '0'"),
        ('data=-1', "data must be a number of devices, not '-1'"),
        ('data=x', "data must be a number of devices, not 'x'"),
    ],
)
def test_a_wrong_mesh_is_refused(text, said):
  with pytest.raises(ValueError, match='mesh=') as error:
    mesh.parse(text)
  assert said in str(error.value) and text in str(error.value)


def test_too_few_devices_are_said():
  with pytest.raises(ValueError, match=r'needs 64 devices: there are 8 \(cpu'):
    mesh.make('data=64')
  with pytest.raises(ValueError, match='needs 16 devices: this process'):
    mesh.host_devices('data=16')
  mesh.host_devices('data=8')  # there are as many


def test_a_host_is_not_shown_as_any_number_of_devices():
  assert len(jax.devices()) == 8
  with pytest.raises(ValueError, match='needs 9{15} devices: this process'):
    mesh.host_devices('data=' + 15 * '9')


def test_one_device_needs_no_mesh():
  assert mesh.make('') == mesh.make('data=1,context=1') == mesh.SINGLE
  assert mesh.SINGLE.size() == mesh.SINGLE.size('data') == 1
  assert mesh.SINGLE.map(len, None, None) is len


def test_what_a_mesh_can_not_cut_is_refused():
  cfg = samples.config(experts=6, width=36, heads=2, head_width=16)
  with pytest.raises(ValueError, match=r"expert=4 can not cut .*'expert'.* 6;"):
    model.init(cfg, 0, mesh.make('expert=4'))
  with pytest.raises(ValueError, match=r"fsdp=8 can not cut .*'embed'.* 36;"):
    model.init(cfg, 0, mesh.make('fsdp=8'))


def test_weights_are_cut_and_equal():
  cfg = samples.config(attention_sink=True)
  parallel = mesh.make('fsdp=2,expert=2')
  cut, whole = model.init(cfg, 3, parallel), model.init(cfg, 3)
  layer = cut['pattern'][0]
  shape = layer['expert_in'].shape
  assert layer['expert_in'].addressable_shards[0].data.shape == (
      shape[0], shape[1] // 2, shape[2] // 2, shape[3],
  )  # fmt: skip
  assert layer['balance'].is_fully_replicated
  assert layer['query'].addressable_shards[0].data.shape[1] == cfg.width // 2
  for a, b in zip(jax.tree.leaves(cut), jax.tree.leaves(whole)):
    assert numerics.unequal_bits(a, b) == 0


@pytest.mark.parametrize('parts', [2, 4])
@pytest.mark.parametrize('past', [0, 2, 4, 6, 10, 12])
def test_what_precedes_a_part(parts, past):
  """Against slicing by hand; before the beginning stands the end."""
  length, own = 16, 16 // parts
  if past > length - own:
    pytest.skip('more than there is')
  parallel = mesh.make(f'context={parts}')
  x = np.arange(2 * length).reshape(2, length)
  cut = np.stack([x[:, i * own :][:, :own] for i in range(parts)])
  run = parallel.map(lambda a: parallel.past(a[0], past)[None], (OWN,), OWN)
  found = np.asarray(jax.jit(run)(cut))
  for i in range(parts):
    places = np.arange(i * own - past, (i + 1) * own) % length
    np.testing.assert_array_equal(found[i], x[:, places])


def test_an_exchange_returns():
  parallel = mesh.make('data=2,expert=4')
  x = np.arange(8 * 4 * 3).reshape(8, 4, 3)

  def there(a):
    return parallel.exchange(a[0])[None]

  def back(a):
    return there(there(a))

  run = lambda f: np.asarray(jax.jit(parallel.map(f, (OWN,), OWN))(x))
  np.testing.assert_array_equal(run(back), x)
  sent = run(there)
  for device in range(8):
    first = device - device % 4
    for sender in range(4):
      np.testing.assert_array_equal(
          sent[device, sender], x[first + sender, device % 4]
      )


@pytest.mark.parametrize('place', [None, 0, 2, 3])
def test_a_maximum_keeps_what_is_no_number(place):
  parallel = mesh.make('data=2,fsdp=2')
  own = parallel.by_device().spec
  program = jax.jit(parallel.map(lambda x: parallel.max(x), own, own))
  values = np.asarray([0, 3, 1, 2], np.float32)
  if place is not None:
    values[place] = np.nan
  want = 3 if place is None else np.inf
  np.testing.assert_array_equal(program(values), [want] * 4)


def test_gradients_are_summed_where_weights_are_copied():
  """d/dw of Σ over devices of x_i · w, w cut over fsdp only."""
  parallel = mesh.make('data=2,fsdp=2,context=2')
  axes = {'w': ('embed',)}
  x = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)
  w = {'w': np.ones(4, np.float32)}

  def own(w, x):
    value = lambda w: (parallel.gather(w, axes)['w'] * x[0]).sum()
    return parallel.sum_gradients(jax.grad(value)(w), axes)

  specs = parallel.specs(axes)
  found = jax.jit(parallel.map(own, (specs, OWN), specs))(w, x)['w']
  np.testing.assert_array_equal(np.asarray(found), x.sum(0))


def test_moments_live_beside_their_weights():
  cfg = samples.config()
  parallel = mesh.make('fsdp=2,expert=4')
  for name in ('adam', 'muon'):
    optimizer = optimizer_lib.make(name, learning_rate=0.1, steps=5)
    learner = update.Learner(
        cfg,
        update.LossConfig(),
        optimizer,
        rows=8,
        row_tokens=64,
        parallel=parallel,
    )
    weights = model.init(cfg, 0, parallel)
    state = jax.tree.leaves(learner.init(weights))
    experts = weights['pattern'][0]['expert_in']
    beside = [a for a in state if a.shape == experts.shape]
    assert len(beside) >= (2 if name == 'adam' else 1) * 2  # of two layers
    assert all(a.sharding == experts.sharding for a in beside)
    plain = jax.tree.leaves(jax.jit(optimizer.init)(model.init(cfg, 0)))
    assert [a.shape for a in state] == [a.shape for a in plain]


def test_the_forward_sums_nothing_across_devices():
  """The lint, over the sampler's and the learner's program on a mesh."""
  cfg = samples.config(max_context=64)
  parallel = mesh.make('data=1,fsdp=2,expert=2,context=2')
  logical = model.logical_axes(cfg)
  weights = model.init(cfg, 0, parallel)
  learner = update.Learner(
      cfg,
      update.LossConfig(),
      optimizer_lib.make('adam', learning_rate=0.1, steps=5),
      rows=8,
      row_tokens=64,
      parallel=parallel,
  )
  batch = inputs_lib.flatten(learner.pack([_example(cfg)]), parallel)

  def logprobs(w, b):
    b = jax.tree.map(lambda a: a[0], b)
    logp = update.policy_logprobs(w, b, cfg, 1.0, parallel)[0]
    return logp[None]

  run = parallel.map(logprobs, (parallel.specs(logical), OWN), OWN)
  text = nx.jit(run).lower(weights, batch).as_text()
  assert 'all_gather' in text and 'all_to_all' in text
  assert 'collective_permute' in text  # the window's halo
  assert numerics.order_sensitive_reductions(text) == []

  program = engine_lib.step_program(
      cfg, engine_lib.Sampling(), 0, False, parallel
  )
  engine = engine_lib.Engine(cfg, 0, max_sequences=4)
  inputs, _ = engine.stage([], 0)
  stacked = jax.tree.map(lambda a: np.stack([a] * 8), inputs)
  pool = forward_lib.init_pool(cfg, engine.pages.num_pages)
  pool = jax.tree.map(lambda a: jnp.concatenate([a] * 8), pool)
  text = program.lower(
      weights, pool, stacked, np.uint32(0), np.float32(1)
  ).as_text()
  assert 'all_gather' in text and 'all_to_all' in text
  assert numerics.order_sensitive_reductions(text) == []


def _example(cfg):
  tokens = np.arange(40, dtype=np.int32) % cfg.vocab
  return pack_lib.from_text(tokens, np.ones(40, np.float32))
