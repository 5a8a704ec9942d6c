"""Calls functions of the workspace and reports what they return.

Runs inside the sandbox as `python -c THIS_TEXT`; nothing imports it. It gets
the calls on standard input and knows no expected value: the verdict is made by
`swe_tests.py`, outside. So code under test that takes this process over gains
nothing: it can only report values, as it could have returned them.

Written for a quick start: no import that a bare interpreter lacks.
"""

import os
from _json import encode_basestring_ascii


def encode(value):
  """Returns JSON for plain values; any other type can equal nothing."""
  kind = type(value)
  if value is None:
    return 'null'
  if kind is bool:
    return 'true' if value else 'false'
  if kind is int or kind is float:
    return repr(value)
  if kind is str:
    return encode_basestring_ascii(value)
  if kind is list:
    return '[' + ','.join([encode(item) for item in value]) + ']'
  if kind is dict and all(type(key) is str for key in value):
    return (
        '{'
        + ','.join(
            [
                encode_basestring_ascii(key) + ':' + encode(item)
                for key, item in value.items()
            ]
        )
        + '}'
    )
  raise TypeError('not a plain value')


def main():
  """Answers each call with one line."""
  report = os.dup(1)
  null = os.open('/dev/null', os.O_RDWR)
  os.dup2(null, 1)
  os.dup2(null, 2)
  data = b''
  while chunk := os.read(0, 65536):
    data += chunk
  cases = eval(data, {'__builtins__': {}})
  for module, function, args in cases:
    try:
      value = getattr(__import__(module), function)(*args)
      line = '[true,' + encode(value) + ']\n'
    except BaseException:
      line = '[false,null]\n'
    data = line.encode()
    while data:
      data = data[os.write(report, data) :]
  os._exit(0)


main()
