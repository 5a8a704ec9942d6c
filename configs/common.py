"""What every config uses: arguments, overrides, components, identity.

A config file has `get_config(arg=None)`, which returns a locked ConfigDict of
plain values; nothing here imports JAX. Rules:

  * Arguments (`swe.py:debug,layers=24`) are for values that touch several
    fields; `parse_arg` is strict about them.
  * Any single field is overridden by its path: `--config.learner.rows=4` on
    the command line, `override(config, {'learner.rows': 4})` in Python.
  * A component is chosen by `name`, and keeps the options of each choice in a
    dict called like it, so that changing the name is enough:

        config.credit = dict(
            name='action_td',
            action_td=dict(lam=0.2),
            grpo=dict(normalize_std=True),
        )

    `options(config.credit)` are the options of the chosen one: the values
    beside `name` (common to all choices), then those of its own dict. The
    dicts of other choices are ignored.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import pathlib
import re
from typing import Any, Iterable, Mapping, Sequence, TypeAlias

import ml_collections

from agentic_rl import metrics
from agentic_rl import types

ROOT = pathlib.Path(__file__).resolve().parent.parent
ConfigDict: TypeAlias = ml_collections.ConfigDict

_TRUE = ('true', 'yes', '1')
_FALSE = ('false', 'no', '0')
_ABSENT = object()


class ConfigError(Exception):
  """A mistake in a config, an argument or an override, told in one message.

  Not a ValueError: the flag parser rewraps those with their tracebacks.
  """


# --------------------------------------------------------------- arguments


def parse_arg(arg: str | None, **spec: Any) -> ConfigDict:
  """Parses the argument of a config, `a,b=1`, strictly.

  Args:
    arg: what follows the colon in `swe.py:debug,layers=24`, or None. A bare
      name sets a flag.
    **spec: every allowed argument with its default, which also gives its type:
      bool, int, float or str.

  Returns:
    A locked ConfigDict with all the arguments.

  Raises:
    ConfigError: unknown, repeated or badly typed argument.
  """
  values = dict(spec)
  seen: set[str] = set()
  for part in (arg or '').split(','):
    if not part.strip():
      continue
    name, equals, text = (piece.strip() for piece in part.partition('='))
    if name not in spec:
      known = ', '.join(_example(k, v) for k, v in spec.items()) or 'none'
      raise ConfigError(
          f'unknown config argument {name!r}{_near(name, spec)};'
          f' allowed: {known}'
      )
    if name in seen:
      raise ConfigError(f'config argument {name!r} is given twice')
    seen.add(name)
    values[name] = _parse_value(name, text if equals else None, spec[name])
  config = ConfigDict(values)
  config.lock()
  return config


def _parse_value(name: str, text: str | None, default: Any) -> Any:
  """Reads `text` as the type of `default`; None is a bare name."""
  kind = type(default)
  if kind not in (bool, int, float, str):
    raise ConfigError(
        f'config argument {name!r} has a default of type {kind.__name__};'
        ' use bool, int, float or str'
    )
  if text is None:
    if kind is bool:
      return True
    raise ConfigError(
        f'config argument {name!r} needs a value: {_example(name, default)}'
    )
  try:
    if kind is bool:
      return bool((_FALSE + _TRUE).index(text.lower()) >= len(_FALSE))
    return kind(text)
  except ValueError:
    raise ConfigError(
        f'config argument {name!r} must be {kind.__name__}, not {text!r}'
    ) from None


def _example(name: str, default: Any) -> str:
  return name if isinstance(default, bool) else f'{name}={default}'


def _near(name: str, known: Iterable[str]) -> str:
  near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
  return f' (near: {", ".join(near)})' if near else ''


# ---------------------------------------------------------- locks, overrides


def locked(config: Mapping[str, Any] | ConfigDict) -> ConfigDict:
  """Returns `config` as a ConfigDict that takes no new fields."""
  out = (
      config
      if isinstance(config, ml_collections.ConfigDict)
      else ConfigDict(config)
  )
  out.lock()
  return out


def fields(config: Any) -> dict[str, Any]:
  """Returns the leaves by their paths, `{'credit.name': 'grpo', ...}`."""
  return dict(_walk(_untracked(config), ''))


def _walk(node, prefix: str):
  for key in node:
    value, path = node[key], f'{prefix}{key}'
    if isinstance(value, ml_collections.ConfigDict):
      yield from _walk(value, path + '.')
    else:
      yield path, value


def check_field(config: ConfigDict, path: str) -> None:
  """Raises ConfigError, with the near ones, unless `path` is in `config`."""
  node: Any = config
  for i, key in enumerate(path.split('.')):
    if not isinstance(node, ml_collections.ConfigDict) or key not in node:
      # Near in spelling, or of the same last name anywhere.
      known = list(fields(config))
      same = [k for k in known if k.split('.')[-1] == path.split('.')[-1]]
      near = difflib.get_close_matches(path, known, n=4, cutoff=0.6)
      near = list(dict.fromkeys(same[:4] + near))
      place = '.'.join(path.split('.')[:i])
      if isinstance(node, ml_collections.ConfigDict):
        here = f'fields of {place or "the config"}: {", ".join(node)}'
      else:
        here = f'{place} is a value, without fields'
      hint = f' (near: {", ".join(near)})' if near else ''
      raise ConfigError(f'unknown config field {path!r}{hint}; {here}')
    node = node[key]


def override(config: ConfigDict, values: Mapping[str, Any]) -> ConfigDict:
  """Sets fields by path, in place.

  Args:
    config: a ConfigDict, locked or not.
    values: new values, as in `{'credit.name': 'grpo'}`; an int is taken for a
      float.

  Returns:
    The same `config`.

  Raises:
    ConfigError: unknown field, or a value of another type.
  """
  for path, value in values.items():
    check_field(config, path)
    *parents, last = path.split('.')
    node = config
    for key in parents:
      node = node[key]
    if isinstance(node[last], ml_collections.ConfigDict):
      raise ConfigError(f'{path!r} holds fields; override one of them')
    if isinstance(node[last], bool) != isinstance(value, bool) and (
        node[last] is not None
    ):
      raise ConfigError(_type_message(path, node[last], value))
    try:
      node[last] = value
    except (TypeError, ValueError):
      raise ConfigError(_type_message(path, node[last], value)) from None
  return config


def override_words(
    config: ConfigDict, words: Sequence[str], flag: str = 'config'
) -> ConfigDict:
  """Applies words like `--config.policy.layers=4`, in place.

  Args:
    config: a ConfigDict, locked or not.
    words: what a command line holds besides its own flags.
    flag: name of the config flag.

  Returns:
    The same `config`.

  Raises:
    ConfigError: another word, an unknown field, or a value of another type.
  """
  for word in words:
    match = re.fullmatch(rf'--?{flag}\.([^=]+)=(.*)', word, re.DOTALL)
    if match is None:
      raise ConfigError(
          f'unexpected argument {word!r}; overrides are --{flag}.FIELD=VALUE'
      )
    path, text = match.groups()
    check_field(config, path)
    node: Any = config
    for key in path.split('.'):
      node = node[key]
    if isinstance(node, ml_collections.ConfigDict):
      raise ConfigError(f'{path!r} holds fields; override one of them')
    override(config, {path: _parse_value(path, text, node)})
  return config


def _type_message(path: str, old: Any, new: Any) -> str:
  return (
      f'config field {path!r} is {type(old).__name__} ({old!r}),'
      f' not {type(new).__name__} ({new!r})'
  )


def options(component: Any) -> dict[str, Any]:
  """Returns the options of the chosen component (see the module).

  Args:
    component: a ConfigDict with a `name`.

  Returns:
    Keyword arguments, without `name`.

  Raises:
    ConfigError: no `name`, or an option that is given in both places.
  """
  if 'name' not in component:
    raise ConfigError(f'a component without a name: {list(component)}')
  name = component['name']
  out: dict[str, Any] = {}
  own: dict[str, Any] = {}
  for key in component:
    if not _is_dict(component, key):
      if key != 'name':
        out[key] = component[key]
    elif key == name:
      own = dict(component[key].items())
    elif isinstance(component, ReadTracker):
      component.skip(key)  # options of another choice
  for key in own:
    if key in out:
      raise ConfigError(f'option {key!r} is beside {name!r} and inside it')
  return {**out, **own}


def _is_dict(component: Any, key: str) -> bool:
  return isinstance(_untracked(component)[key], ml_collections.ConfigDict)


# ------------------------------------------------------------------ identity


def plain(config: Any) -> dict[str, Any]:
  """Returns JSON values: nested dicts, tuples as lists."""
  text = json.dumps(_untracked(config).to_dict(), default=_jsonable)
  return json.loads(text)


def _jsonable(value: Any) -> Any:
  if hasattr(value, 'tolist'):  # NumPy scalars and arrays
    return value.tolist()
  raise ConfigError(f'a config holds plain values, not {value!r}')


def config_hash(config: Any) -> str:
  """Returns 16 hex digits that change with any field."""
  return types.content_hash(plain(config))


def save_resolved(config: Any, path: str | pathlib.Path) -> None:
  """Writes the config with all overrides as JSON, whole or not at all."""
  text = json.dumps(plain(config), indent=2, sort_keys=True)
  metrics.write_atomically(path, text + '\n')


def load_resolved(path: str | pathlib.Path) -> ConfigDict:
  """Reads what `save_resolved` wrote; sequences come back as tuples.

  Args:
    path: the JSON file.

  Returns:
    A locked ConfigDict.

  Raises:
    ConfigError: the file is missing or is not a config.
  """
  try:
    value = json.loads(pathlib.Path(path).read_text())
  except OSError as error:
    why = error.strerror or error
    raise ConfigError(f'cannot read the config {path}: {why}') from None
  except ValueError as error:
    raise ConfigError(f'{path} is not a saved config: {error}') from None
  if not isinstance(value, dict):
    raise ConfigError(f'{path} is not a saved config')
  return locked(ConfigDict(_tuples(value)))


def check_kinds(
    config: ConfigDict, like: ConfigDict, path: str | pathlib.Path
) -> None:
  """Checks that a saved config can be read as another one is.

  Fields of either that the other lacks are no mistake: runs are older or newer
  than the code. Whole groups of fields must be there.

  Args:
    config: the saved one.
    like: a config of the code.
    path: of the file, for the message.

  Raises:
    ConfigError: a group is missing, or a value is of another type.
  """
  have = fields(config)
  for key, old in fields(like).items():
    group = key.split('.')[0]
    if '.' in key and not _is_group(config, group):
      raise ConfigError(f'{path}: no fields {group}.*')
    new = have.get(key, old)
    kinds = (int, float) if type(old) is float else (type(old),)
    if type(new) not in kinds:
      raise ConfigError(f'{path}: {_type_message(key, old, new)}')


def _is_group(config: ConfigDict, name: str) -> bool:
  return name in config and _is_dict(config, name)


def _tuples(value: Any) -> Any:
  if isinstance(value, dict):
    return {k: _tuples(v) for k, v in value.items()}
  if isinstance(value, list):
    return tuple(_tuples(v) for v in value)
  return value


def check_same(
    config: Any, path: str | pathlib.Path, *, free: Sequence[str] = ()
) -> None:
  """Checks that a work directory belongs to this config.

  Args:
    config: the config of this run.
    path: the resolved config in the work directory.
    free: fields, or their parents, that may change between runs of one
      directory, as in `('train.iterations', 'log')`.

  Raises:
    ConfigError: some other field differs; the message lists them.
  """
  here = fields(locked(ConfigDict(_tuples(plain(config)))))
  there = fields(load_resolved(path))
  lines = []
  for key in sorted(here.keys() | there.keys()):
    if any(key == f or key.startswith(f + '.') for f in free):
      continue
    old, new = there.get(key, _ABSENT), here.get(key, _ABSENT)
    if old != new:
      lines.append(f'  {key}: {_shown(old)} there, {_shown(new)} now')
  if lines:
    more = [f'  and {len(lines) - 12} more'] if len(lines) > 12 else []
    raise ConfigError(
        f'{pathlib.Path(path).parent} holds a run of another config:\n'
        + '\n'.join(lines[:12] + more)
        + '\nUse another --workdir, or the old values.'
    )


def _shown(value: Any) -> str:
  return 'absent' if value is _ABSENT else repr(value)


# -------------------------------------------------------------- unread fields


class ReadTracker:
  """A view of a ConfigDict that remembers which leaves were read.

  Pass it in place of the config through a short run, then ask `unread()`: a
  field that nothing reads is a mistake. Hashing and saving do not count.
  """

  def __init__(
      self, config: ConfigDict, _prefix: str = '', _read: set | None = None
  ):
    self._config = config
    self._prefix = _prefix
    self._read: set[str] = set() if _read is None else _read

  def __getitem__(self, key: str) -> Any:
    value = self._config[key]
    if isinstance(value, ml_collections.ConfigDict):
      return ReadTracker(value, f'{self._prefix}{key}.', self._read)
    self._read.add(f'{self._prefix}{key}')
    return value

  def __getattr__(self, key: str) -> Any:
    if key.startswith('_'):
      raise AttributeError(key)
    try:
      return self[key]
    except KeyError as error:
      raise AttributeError(str(error)) from None

  def __contains__(self, key: object) -> bool:
    return key in self._config

  def __iter__(self):
    return iter(self._config)

  def __len__(self) -> int:
    return len(self._config)

  def keys(self) -> list[str]:
    """Returns the names of the fields."""
    return list(self._config)

  def get(self, key: str, default: Any = None) -> Any:
    """Returns the field `key`, read, or `default`."""
    return self[key] if key in self._config else default

  def items(self) -> list[tuple[str, Any]]:
    """Returns all fields; their leaves are read."""
    return [(key, self[key]) for key in self._config]

  def values(self) -> list[Any]:
    """Returns all values; the leaves are read."""
    return [self[key] for key in self._config]

  def to_dict(self) -> dict[str, Any]:
    """Returns nested dicts; everything below is read."""
    self._read.update(self._prefix + path for path in fields(self._config))
    return self._config.to_dict()

  def skip(self, key: str) -> None:
    """Counts everything below `key` as read: it was decided against."""
    node = self._config[key]
    self._read.update(f'{self._prefix}{key}.{path}' for path in fields(node))

  def unread(self) -> list[str]:
    """Returns the paths of the leaves that nothing has read, sorted."""
    every = {self._prefix + path for path in fields(self._config)}
    return sorted(every - self._read)


def _untracked(config: Any) -> ConfigDict:
  return config._config if isinstance(config, ReadTracker) else config


# --------------------------------------------------------------- command line


def load(spec: str) -> ConfigDict:
  """Loads `path.py[:arg]` as the command line does.

  Args:
    spec: path of a config file, relative to the current directory or to the
      repository, and its argument.

  Returns:
    What its `get_config` returns.

  Raises:
    ConfigError: no such file, or a wrong argument.
  """
  path, colon, arg = spec.partition(':')
  path = _find(path)
  module_spec = importlib.util.spec_from_file_location('config_file', path)
  if module_spec is None or module_spec.loader is None:
    raise ConfigError(f'{path} is not a Python file')
  module = importlib.util.module_from_spec(module_spec)
  module_spec.loader.exec_module(module)
  return module.get_config(*([arg] if colon else []))


def _find(path: str) -> str:
  """Returns the config file as an absolute path."""
  for base in (pathlib.Path.cwd(), ROOT):
    if (base / path).is_file():
      return str((base / path).resolve())
  known = sorted(
      str(p.relative_to(ROOT))
      for p in (ROOT / 'configs').rglob('*.py')
      if p.name not in ('__init__.py', 'common.py')
  )
  near = _near(path, known)
  raise ConfigError(f'no config {path!r}{near}; there are: {", ".join(known)}')


def prepare_argv(argv: Sequence[str], flag: str = 'config') -> list[str]:
  """Checks the config and its overrides before the flags are parsed.

  Args:
    argv: the command line, program first.
    flag: name of the config flag.

  Returns:
    The command line with the config file as an absolute path.

  Raises:
    ConfigError: no such file, a wrong argument, or an unknown field.
  """
  out = list(argv)
  place = _find_flag(out, flag)
  if place is None:
    return out  # the flag parser says that it is required
  i, value = place
  config = load(value)
  name, colon, arg = value.partition(':')
  out[i] = ('' if out[i] == value else f'--{flag}=') + _find(name) + colon + arg
  for word in out[1:]:
    match = re.match(rf'--?(?:no)?{flag}\.([^=]+)', word)
    if match:
      # Elements of tuples, as in `sizes[0]`, are checked by the flag parser.
      check_field(config, match.group(1).split('[')[0])
  return out


def _find_flag(argv: Sequence[str], flag: str) -> tuple[int, str] | None:
  """Returns the place and the value of `--flag=value` or `--flag value`."""
  for i, word in enumerate(argv):
    if re.fullmatch(rf'--?{flag}', word) and i + 1 < len(argv):
      return i + 1, argv[i + 1]
    if re.match(rf'--?{flag}=', word):
      return i, word.split('=', 1)[1]
  return None


def default_workdir(spec: str, seed: int) -> str:
  """Returns `runs/<config>[-<arg>]-seed<seed>` for a config `path.py[:arg]`."""
  path, _, arg = spec.partition(':')
  name = pathlib.Path(path).stem
  tail = re.sub(r'[^A-Za-z0-9_.=+]+', '-', arg).strip('-')
  parts = [name, tail[:100], f'seed{seed}']
  return str(pathlib.Path('runs') / '-'.join(filter(None, parts)))
