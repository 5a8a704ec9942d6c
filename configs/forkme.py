"""The smallest complete config, made to be copied.

What is left out has its default: see `PolicyConfig`, `SweOptions`, `Noise` and
the arguments of the estimator and of the optimizer. `swe.py` spells all out.

Command: `python launch/main.py --config=configs/forkme.py`
Hardware: two CPU cores, 2 GB, half a minute.
Expected: a run that ends. It is far too short to solve anything.
"""

from configs import common


def get_config(arg=None):
  """Returns the config; `arg` as in `iterations=4`."""
  arg = common.parse_arg(arg, iterations=2)
  config = common.ConfigDict()
  config.seed = 0
  config.mesh = ''

  # Components are chosen by name, with their options beside it.
  config.tasks = dict(
      name='fresh', fresh=dict(difficulty='tiny', holdout_fraction=0.1)
  )
  config.tokenizer = dict(vocab_size=512, corpus_tasks=100)
  config.env_pool = dict(workers=1, deadline_s=60.0)
  config.env = dict(name='swe', max_turns=5)
  config.policy = dict(
      width=32, layers=4, experts=4, expert_width=32, max_context=128
  )

  # First the expert's traces, then P tasks x G rollouts per iteration.
  config.warm_start = dict(
      weights='',
      steps=4,
      sequences=8,
      rows=4,
      observation_weight=0.3,
      noise=dict(verify=0.5),
      balance=0.001,
      checkpoint_every=4,
      optimizer=dict(name='muon', learning_rate=3e-3),
  )
  config.rollout = dict(
      tasks=2,
      group=4,
      engines=1,
      max_sequences=8,
      pool_pages=0,
      action_tokens=16,
      deadline_s=60.0,
  )
  config.sampling = dict(temperature=1.0)
  config.credit = dict(name='action_td', lam=0.2)
  config.learner = dict(
      iterations=arg.iterations,
      rows=4,
      row_tokens=128,
      loss=dict(
          name='ppo_clip',
          ppo_clip=dict(clip_low=0.8, clip_high=1.28),
      ),
      entropy=0.0,
      reference_kl=0.0,
      balance=0.0,
      anchor='behavior',
      correction=dict(name='none'),
      routing_replay='none',
      on_mismatch='stop',
      optimizer=dict(name='adam', learning_rate=1e-4),
  )
  config.evaluation = dict(tasks=4, greedy_tasks=4, every=0)
  config.checkpoint = dict(keep=2, rl_every=1)
  config.alerts = (('status/env_failure', None, 0.0),)  # (metric, low, high)
  return common.locked(config)
