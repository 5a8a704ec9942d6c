import pytest

from agentic_rl.envs import grammar

Call = grammar.Call


@pytest.mark.parametrize(
    ('text', 'call'),
    [
        ('test', Call('test')),
        ('  list \n', Call('list')),
        ('submit', Call('submit')),
        ('view util.py', Call('view', ('util.py',))),
        ('edit a.py 3 return x', Call('edit', ('a.py', 3, 'return x'))),
        (
            'edit a.py 3   x = 1  # y z',
            Call('edit', ('a.py', 3, 'x = 1  # y z')),
        ),
        ('edit a.py 007 x', Call('edit', ('a.py', 7, 'x'))),
        ('edit a.py 1 naïve = "é"', Call('edit', ('a.py', 1, 'naïve = "é"'))),
    ],
)
def test_calls(text, call):
  assert grammar.parse(text) == call
  assert grammar.parse(grammar.render(call)) == call


@pytest.mark.parametrize(
    ('text', 'reason'),
    [
        ('', 'empty action'),
        (' \n ', 'empty action'),
        ('foo', "unknown tool 'foo'"),
        ('Test', "unknown tool 'Test'"),
        ('rm -rf /', "unknown tool 'rm'"),
        ('x' * 50, f"unknown tool '{'x' * 16}'"),
        ("it's\u00e9", "unknown tool 'it?s?'"),
        ('test now', 'test takes no arguments'),
        ('view', 'view takes FILE'),
        ('view a b', 'view takes FILE'),
        ('edit a.py 3', 'edit takes FILE LINE TEXT'),
        ('edit a.py x y', "bad line number 'x'"),
        ('edit a.py -1 y', "bad line number '-1'"),
        ('edit a.py 1.0 y', "bad line number '1.0'"),
        ('edit a.py \u0663 y', "bad line number '?'"),
        ('edit a.py 99999999999 y', 'bad line number'),
        ('edit a.py 1 x\ny', 'action is not one line of text'),
        ('edit a.py 1 x\ry', 'action is not one line of text'),
        ('edit a.py 1 x\u2028y', 'action is not one line of text'),
        ('view a\0b', 'action is not one line of text'),
        ('edit a.py 1 \ud800', 'action is not one line of text'),
        ('edit a.py 1 ' + 'x' * 3000, 'action too long'),
        ('{"tool": "test"}', 'unknown tool \'{"tool":\''),
        (None, 'action is not text'),
        (7, 'action is not text'),
    ],
)
def test_malformed(text, reason):
  assert grammar.parse(text) == grammar.Malformed(reason)


def test_any_text_is_parsed():
  for code in range(0x3000):
    for text in (chr(code), f'view {chr(code)}', f'edit a {chr(code)} b'):
      grammar.parse(text)
