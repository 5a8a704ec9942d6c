"""Generated tasks: sound bugs, right fixes, disjoint splits."""

import itertools
import time

import pytest

from agentic_rl.tasks import execute
from agentic_rl.tasks import expert
from agentic_rl.tasks import generate
from agentic_rl.tasks import templates


@pytest.fixture(scope='module')
def tasks():
  return list(generate.generate_tasks(400))


def test_a_task_has_the_payload_that_environments_read():
  task = generate.generate_task(3)
  assert task.env == 'swe'
  assert set(task.payload) == {'files', 'tests', 'hidden_tests'}
  assert list(task.payload['tests']) == ['tests.py']
  assert task.prompt == ' '.join(sorted(task.payload['files']))
  for module, name, args, want in task.payload['hidden_tests']['cases']:
    assert f'def {name}(' in task.payload['files'][f'{module}.py']
    assert isinstance(args, list) and isinstance(want, int)


def test_generation_is_a_pure_function_of_its_arguments():
  first = generate.generate_task(7, 'heldout', 'hard')
  generate.generate_task(8, 'train', 'default')
  assert generate.generate_task(7, 'heldout', 'hard') == first
  assert generate.generate_task(8, 'heldout', 'hard') != first


def test_known_task_is_unchanged():
  # Another id means other tasks: then raise GENERATOR_VERSION.
  assert generate.GENERATOR_VERSION == 2
  assert generate.generate_task(0).task_id == 'f643d35bf0af643f'


def test_bugs_fail_and_fixes_pass(tasks):
  for task in tasks:
    assert generate.verify_task(task) == []
    (bug,) = task.meta['bugs']
    lines = task.payload['files'][bug['file']].split('\n')
    assert lines[bug['line'] - 1].strip() == bug['old'] != bug['new']


def test_the_specification_names_every_constant_of_the_fix(tasks):
  for task in tasks:
    (bug,) = task.meta['bugs']
    lines = task.payload['files'][bug['file']].split('\n')
    above = lines[: bug['line'] - 1]
    spec = [line for line in above if line.startswith('# ')][-1]
    digits = [t for t in bug['new'].replace(':', ' ').split() if t.isdigit()]
    assert all(d in spec for d in digits if bug['kind'] == 'constant')


def test_every_function_has_four_hidden_cases_unlike_the_visible(tasks):
  for task in tasks:
    visible = execute.visible_cases(task.payload['tests']['tests.py'])
    hidden = task.payload['hidden_tests']['cases']
    seen = {(m, f, tuple(a)) for m, f, a, _ in visible}
    assert not seen & {(m, f, tuple(a)) for m, f, a, _ in hidden}
    for file, text in task.payload['files'].items():
      for line in text.split('\n'):
        if line.startswith('def '):
          at = [file[:-3], line[4 : line.index('(')]]
          assert sum(c[:2] == at for c in hidden) >= 4
          assert sum(list(c[:2]) == at for c in visible) == 4


def test_only_equal_functions_pass_the_hidden_tests(tasks):
  wrong = passed = 0
  for task in tasks[:200]:
    (bug,) = task.meta['bugs']
    text = task.payload['files'][bug['file']]
    cases = task.payload['hidden_tests']['cases']
    names = set(templates.VARIABLE_NAMES) & set(_words(text))
    fixed = generate.fixed_files(task)
    (key,) = [k for k in task.meta['keys'] if f'|{bug["function"]},' in k]
    inputs = templates.TEMPLATE_BY_NAME[key.split('|')[0]].inputs
    for new in expert.one_token_changes(bug['new'], names):
      files = {
          **task.payload['files'],
          bug['file']: generate.replace_line(text, bug['line'], new),
      }
      wrong += 1
      if execute.first_failure(files, cases) is not None:
        continue
      passed += 1  # `>=` for `>`, where both sides are equal
      for args in inputs:
        case = [bug['file'][:-3], bug['function'], args, None]
        assert execute.call(files, case) == execute.call(fixed, case), new
  assert wrong > 1000
  assert passed < 0.06 * wrong


def _words(text):
  return ''.join(c if c.isalnum() else ' ' for c in text).split()


def test_all_templates_and_kinds_of_bugs_occur():
  tasks = list(generate.generate_tasks(600, difficulty='tiny'))
  kinds = [t.meta['bugs'][0]['kind'] for t in tasks]
  assert len(templates.TEMPLATES) >= 24
  assert {t.meta['templates'][0] for t in tasks} == {
      t.name for t in templates.TEMPLATES
  }
  for kind in templates.KINDS:
    assert kinds.count(kind) > 30, kind


def test_splits_share_no_function(tasks):
  heldout = list(generate.generate_tasks(200, 'heldout'))
  report = generate.disjointness_report(tasks, heldout)
  assert report['functions']['overlap'] == 0
  assert report['tasks']['overlap'] == 0
  # The split is by function, not by template or constant.
  assert report['templates']['overlap'] == len(templates.TEMPLATES)
  assert report['constants']['overlap'] > 0
  again = generate.disjointness_report(tasks, tasks[:5])
  assert again['tasks']['overlap'] == 5
  assert again['functions']['overlap'] > 5


def test_the_text_of_a_heldout_function_is_never_in_training(tasks):
  def functions(some):
    out = set()
    for task in some:
      for text in generate.fixed_files(task).values():
        out |= set(('\n' + text).split('\n# ')[1:])
    return out

  heldout = list(generate.generate_tasks(200, 'heldout', 'hard'))
  assert not functions(tasks) & functions(heldout)


def test_reserved_templates_are_in_ood_only():
  options = dict(holdout_templates=6)
  sets = {
      split: list(generate.generate_tasks(60, split, **options))
      for split in generate.SPLITS
  }
  report = generate.disjointness_report(sets['train'], sets['ood'])
  assert report['templates']['overlap'] == 0
  assert report['templates']['heldout'] == 6
  report = generate.disjointness_report(sets['train'], sets['heldout'])
  assert report['templates']['overlap'] > 0


@pytest.mark.parametrize('name', generate.DIFFICULTIES)
def test_the_dial_moves_what_it_names(name):
  dial = generate.DIFFICULTIES[name]
  for task in generate.generate_tasks(20, difficulty=name):
    assert generate.verify_task(task) == []
    assert len(task.payload['files']) == dial.modules + dial.distractors
    assert len(task.meta['bugs']) == dial.bugs
    for text in task.payload['files'].values():
      low, high = dial.functions
      assert low <= text.count('def ') <= high
    cases = task.payload['hidden_tests']['cases']
    assert len({c[0] for c in cases}) == dial.modules


def test_every_bug_of_several_must_be_fixed():
  task = generate.generate_task(1, difficulty='modules=2,functions=2,bugs=3')
  cases = task.payload['hidden_tests']['cases']
  for left_out in task.meta['bugs']:
    files = dict(task.payload['files'])
    for bug in task.meta['bugs']:
      if bug != left_out:
        files[bug['file']] = generate.replace_line(
            files[bug['file']], bug['line'], bug['new']
        )
    assert execute.first_failure(files, cases) is not None


def test_difficulty_reads_text_and_mappings():
  parse = generate.Difficulty.parse
  dial = generate.Difficulty(modules=3, functions=(2, 3), bugs=2)
  assert parse('modules=3,functions=2-3,bugs=2') == dial
  assert parse(dial.to_json()) == dial
  assert parse('hard') is generate.DIFFICULTIES['hard']


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(split='test'), "split is 'test'; allowed: one of"),
        (dict(difficulty='easy'), "difficulty is 'easy'; allowed: "),
        (dict(difficulty='modules=x'), "difficulty modules is 'x'"),
        (dict(difficulty='functions=3-2'), r'functions is \(3, 2\)'),
        (dict(difficulty='modules=0'), 'modules is 0; allowed: at least 1'),
        (dict(difficulty='bugs=9'), 'bugs is 9; allowed: 1 to .* 2'),
        (dict(difficulty='modules=13'), 'distractors is 13; allowed: at most'),
        (dict(split='ood'), 'holdout_templates is 0; allowed: at least 1'),
        (dict(holdout_templates=99), 'holdout_templates is 99; allowed: 0 to'),
        (dict(holdout_fraction=1.0), r'holdout_fraction is 1.0; allowed: 0.01'),
    ],
)
def test_bad_arguments_are_named(arguments, message):
  with pytest.raises(ValueError, match=message):
    generate.generate_task(0, **arguments)


def test_names_are_distinct_words():
  every = [
      *templates.FUNCTION_NAMES,
      *templates.MODULE_NAMES,
      *templates.VARIABLE_NAMES,
  ]
  assert len(set(every)) == len(every)
  assert all(name.isalpha() and name.islower() for name in every)
  import builtins
  import keyword
  import sys

  taken = {*dir(builtins), *keyword.kwlist, *sys.stdlib_module_names}
  assert not taken & set(every)


def test_variants_change_one_token_and_never_the_target():
  for template in templates.TEMPLATES:
    for variant in template.variants:
      old, new = template.body[variant.line], variant.text
      assert old != new
      pairs = itertools.zip_longest(old.split(), new.split())
      assert sum(a != b for a, b in pairs) == 1
      if ' = ' in old:
        assert new.split(' = ')[0] == old.split(' = ')[0]


def test_generation_is_fast():
  list(generate.generate_tasks(300, seed=10_000))  # fills the tables
  start = time.process_time()
  list(generate.generate_tasks(500, seed=20_000))
  assert 500 / (time.process_time() - start) > 500
