"""Every check of a policy's shape names the field, the value, what is allowed."""

import dataclasses
import math

import pytest

from agentic_rl.policy import config as config_lib

PolicyConfig = config_lib.PolicyConfig


@pytest.mark.parametrize(
    ('fields', 'match'),
    [
        (dict(width=130), 'width=130: allowed is a multiple of heads'),
        (dict(width=12, heads=4), 'head_width=3: allowed is an even number'),
        (dict(head_width=5), 'head_width=5: allowed is an even number'),
        (dict(heads=4, kv_heads=3), 'heads=4: allowed is kv_heads x integer'),
        (dict(vocab=0), 'vocab=0: allowed is at least 1'),
        (dict(width=0, head_width=8), 'width=0: allowed is at least 1'),
        (dict(layers=0), 'layers=0: allowed is at least 1'),
        (dict(kv_heads=-1), 'kv_heads=-1: allowed is at least 1'),
        (dict(window=0), 'window=0: allowed is at least 1'),
        (dict(topk_pages=0), 'topk_pages=0: allowed is at least 1'),
        (dict(page=12), 'page=12: allowed is a multiple of 8'),
        (dict(page=0), 'page=0: allowed is at least 1'),
        (dict(max_context=250), 'max_context=250: .* multiple of page=16'),
        (dict(max_context=0), 'max_context=0: allowed is at least 1'),
        (dict(pattern=''), "pattern='': allowed is letters"),
        (dict(pattern='wx'), "pattern='wx': allowed is letters"),
        (dict(dense_layers=-1), 'dense_layers=-1: allowed is at least 0'),
        (dict(dense_layers=9), 'dense_layers=9: allowed is 0..layers=8'),
        (dict(layers=6), "layers=6: .* a multiple of the pattern 'wwwb'"),
        (dict(dense_layers=1), 'layers=8: allowed is dense_layers [+]'),
        (dict(topk_experts=0), 'topk_experts=0: allowed is at least 1'),
        (dict(topk_experts=9), 'topk_experts=9: allowed is 1..experts=8'),
        (dict(experts=-2), 'experts=-2: allowed is at least 0'),
        (dict(head_width=-2), 'head_width=-2: allowed is at least 0'),
        (dict(window=2.5), 'window=2.5: allowed is int values'),
        (dict(exact=1), 'exact=1: allowed is bool values'),
        (dict(rope_theta=0), 'rope_theta=0: allowed is above 0'),
        (dict(rope_theta=math.nan), 'rope_theta=nan: allowed is above 0'),
        (dict(soft_cap=-1.0), 'soft_cap=-1.0: allowed is 0 or above'),
        (dict(soft_cap=math.inf), 'soft_cap=inf: allowed is 0 or above'),
        (dict(sink_page=1), 'sink_page=1: allowed is bool values'),
        (dict(gating='tanh'), "gating='tanh': allowed is 'softmax' or"),
        (dict(precision='int8'), "policy.precision='int8': allowed is one of "),
        (
            dict(precision='fp8', width=192, head_width=32),
            "width=192: allowed is a matrix side of at most 128, or .*'fp8'",
        ),
        (
            dict(precision='fp8', head_width=48),
            'head_width=48: .* multiple of it, .* not 192',
        ),
        (
            dict(precision='fp8', expert_width=96),
            'expert_width=96: .* multiple of it, .* not 192',
        ),
        (
            dict(precision='fp8', shared_width=72),
            'shared_width=72: .* multiple of it, .* not 144',
        ),
        (
            dict(precision='fp8', experts=0, dense_width=320),
            'dense_width=320: .* multiple of it, .* not 320',
        ),
        (dict(window=1 << 31), 'window=2147483648: allowed is at most 2147483'),
    ],
)
def test_errors(fields, match):
  with pytest.raises(ValueError, match=match):
    PolicyConfig(**fields)


def test_unknown_preset():
  with pytest.raises(ValueError, match="preset='huge': allowed are .*'tiny'"):
    config_lib.make('huge', {})


def test_unknown_field_lists_near_ones():
  with pytest.raises(ValueError, match="policy.widht: .*near ones: .*'width'"):
    config_lib.make('small', {'widht': 64})
  with pytest.raises(ValueError, match="policy.zzz: .*'vocab'"):
    config_lib.make('small', {'zzz': 1})


@pytest.mark.parametrize('preset', list(config_lib.PRESETS))
def test_presets_are_valid_and_deep(preset):
  cfg = config_lib.make(preset, {})
  assert cfg.layers >= 4
  assert set(config_lib.PRESETS[preset]) <= {
      f.name for f in dataclasses.fields(cfg)
  }
  assert cfg.head_width * cfg.heads == cfg.width
  other = config_lib.make(preset, {'vocab': 99})
  assert dataclasses.replace(cfg, vocab=99) == other


def test_derived_sizes():
  cfg = PolicyConfig(
      layers=9, dense_layers=1, pattern='wwwb', max_context=64, page=16
  )
  assert (cfg.groups, cfg.moe_layers, cfg.pages_per_sequence) == (2, 8, 4)
  assert PolicyConfig(experts=0).moe_layers == 0
  assert PolicyConfig(layers=2, dense_layers=2).groups == 0
  assert PolicyConfig(head_width=64).head_width == 64
  assert math.prod([cfg.heads, cfg.head_width]) == cfg.width
  # What no layer has may have any width.
  PolicyConfig(precision='fp8', experts=0, expert_width=96)
  PolicyConfig(precision='fp8', dense_width=320)
  numerics = PolicyConfig(precision='bfloat16', exact=False).numerics
  assert (numerics.dtype, numerics.exact) == ('bfloat16', False)


def test_a_config_is_fixed_and_hashable():
  cfg = PolicyConfig()
  assert hash(cfg) == hash(PolicyConfig())
  with pytest.raises(dataclasses.FrozenInstanceError):
    cfg.width = 3
