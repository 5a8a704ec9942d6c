"""A small policy learns to fix bugs in miniature repositories.

Command: `python launch/main.py --config=configs/swe.py[:arg]`
Arguments: `debug` (the same whole, about a minute), `layers=8`.
Hardware: two CPU cores, 4 GB.
Expected: see README.md, section Results.
"""

from configs import common


def get_config(arg=None):
  """Returns the config; `arg` is a comma list as in `debug,layers=4`."""
  arg = common.parse_arg(arg, debug=False, layers=8)
  config = common.ConfigDict()
  config.seed = 0
  # Devices, as in 'data=2,fsdp=2,expert=2,context=1'; '' is one. On CPU the run
  # makes as many of the host's devices itself.
  config.mesh = ''

  # Tasks: fresh miniature repositories, held-out ones disjoint by construction.
  config.tasks = dict(
      name='fresh',
      fresh=dict(difficulty='default', holdout_fraction=0.1),
      fixed=dict(tasks=''),
  )
  config.tokenizer = dict(vocab_size=512, corpus_tasks=2000)

  # Environment: real files, real tests, in a sandbox without network.
  # The deadline is longer than 64 tests of a worker that all time out.
  config.env_pool = dict(workers=2, deadline_s=240.0)
  config.env = dict(
      name='swe',
      swe=dict(
          max_turns=10,
          malformed_penalty=0.05,
          outcome_turn_limit=0.0,
          outcome_length=0.0,
          outcome_time_limit=0.0,
          grade_unsubmitted=False,
          sandbox='bubblewrap',
          trusted=False,
          test_timeout_s=2.0,
          memory_mb=256,
          max_obs_chars=1000,
      ),
  )

  # Policy: deep and narrow, three sliding-window layers to one block-sparse.
  config.policy = dict(
      width=128,
      layers=arg.layers,
      heads=4,
      kv_heads=2,
      head_width=32,
      pattern='wwwb',
      window=64,
      page=16,
      topk_pages=4,
      attention_sink=False,
      soft_cap=0.0,
      sink_page=False,
      experts=8,
      topk_experts=2,
      expert_width=64,
      shared_width=0,
      dense_layers=0,
      dense_width=256,
      gating='softmax',
      tied=False,
      rope_theta=10000.0,
      max_context=256,
      precision='float32',
      exact=True,
      impl='auto',
      remat=False,
  )

  # Warm start: supervised learning on an imperfect scripted expert; or, if
  # `weights` names the work directory of another run, what that one ended with.
  config.warm_start = dict(
      weights='',
      steps=400,
      sequences=18,
      rows=4,
      observation_weight=0.3,
      noise=dict(
          list_first=0.02,
          test_first=0.7,
          right_line=0.75,
          right_fix=0.75,
          verify=0.6,
      ),
      balance=0.001,
      checkpoint_every=100,
      optimizer=dict(
          name='muon',
          learning_rate=1e-2,
          warmup=20,
          decay='linear',
          clip_norm=1.0,
          weight_decay=0.0,
          b2=0.95,
      ),
  )

  # Rollouts: P tasks x G samples per iteration.
  config.rollout = dict(
      tasks=8,
      group=16,
      engines=2,
      max_sequences=128,
      pool_pages=0,
      action_tokens=32,
      deadline_s=300.0,
  )
  config.sampling = dict(
      temperature=1.0, top_k=0, top_p=1.0, keep_support=False
  )

  # Credit: one advantage per action.
  config.credit = dict(
      name='action_td',
      action_td=dict(
          lam=0.2,
          visits='first',
          leave_one_out=False,
          normalize_std=False,
          scale=1.0,
          keep_uniform=False,
      ),
      grpo=dict(normalize_std=True, keep_uniform=False, eps=1e-6),
  )

  # Learner: on-policy, one optimizer step per iteration. When sampler and
  # learner disagree although the policy is exact, or more than config.alerts
  # allows (mismatch/*, router/flip*): 'warn', 'skip' the update, or 'stop'.
  config.learner = dict(
      iterations=64,
      rows=8,
      row_tokens=256,
      loss=dict(
          name='ppo_clip',
          ppo_clip=dict(clip_low=0.8, clip_high=1.28),
      ),
      entropy=0.0,
      reference_kl=0.0,
      balance=0.0,
      # When the sampler is another policy than the learner: learner/corrections
      # and policy/routing.
      anchor='behavior',
      correction=dict(
          name='none',
          tis_token=dict(cap=2.0),
          tis_sequence=dict(cap=2.0),
          mask_token=dict(low=0.5, high=2.0),
          mask_sequence=dict(low=0.5, high=2.0),
          mask_geometric=dict(low=0.9, high=1.1),
      ),
      routing_replay='none',
      on_mismatch='stop',
      optimizer=dict(
          name='adam',
          learning_rate=3e-4,
          warmup=0,
          decay='linear',
          clip_norm=1.0,
          weight_decay=0.0,
          b2=0.95,
      ),
  )

  config.evaluation = dict(tasks=384, greedy_tasks=384, every=0)
  config.checkpoint = dict(keep=3, rl_every=1)
  # (metric, low, high), None for no bound.
  config.alerts = (
      ('credit/uniform_share', None, 0.8),
      ('rollout/malformed_share', None, 0.3),
      ('status/env_failure', None, 0.0),
  )

  if arg.debug:
    config.tokenizer.corpus_tasks = 500
    config.policy.update(width=64, layers=4, head_width=16, experts=4)
    config.policy.update(expert_width=32)
    config.warm_start.update(steps=30, sequences=32)
    config.rollout.update(tasks=2, group=4, max_sequences=16)
    config.learner.update(iterations=3, rows=4)
    config.evaluation.update(tasks=16, greedy_tasks=16)
    config.warm_start.checkpoint_every = 15
  return common.locked(config)
