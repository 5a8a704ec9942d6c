import numpy as np
import pytest

from agentic_rl.rollout import paged_kv

SIZE = 8


def routes(value=0):
  return np.full((SIZE, 2, 1), value, np.int16)


def known(pool, *names):
  """Allocates a page for each name and makes it findable."""
  pages = [pool.allocate() for _ in names]
  for page, name in zip(pages, names):
    pool.remember(page, name, routes())
  return pages


def test_pages_are_distinct_until_none_is_left():
  pool = paged_kv.PagePool(5, SIZE)
  pages = [pool.allocate() for _ in range(5)]
  assert sorted(pages) == list(range(5))
  assert pool.bin == 5  # and is never given out
  assert (pool.in_use, pool.available, pool.peak) == (5, 0, 5)
  with pytest.raises(paged_kv.OutOfPagesError, match='all 5 KV pages'):
    pool.allocate()
  pool.release(pages[2])
  assert pool.allocate() == pages[2]


def test_a_shared_page_is_free_after_its_last_owner():
  pool = paged_kv.PagePool(2, SIZE)
  (page,) = known(pool, b'a')
  for _ in range(2):
    found, _ = pool.find(b'a')
    assert found == page
  assert pool.in_use == 1
  for left in (1, 1, 0):
    pool.release(page)
    assert pool.in_use == left
  assert pool.available == 2


@pytest.mark.parametrize('remembered', [False, True])
def test_a_double_release_is_an_error_and_changes_nothing(remembered):
  pool = paged_kv.PagePool(2, SIZE)
  page = pool.allocate()
  if remembered:
    pool.remember(page, b'a', routes())
  pool.release(page)
  for _ in range(2):
    with pytest.raises(ValueError, match=f'page {page} .* more often'):
      pool.release(page)
  assert (pool.in_use, pool.available) == (0, 2)
  assert (pool.find(b'a') is not None) == remembered
  assert pool.in_use == remembered
  assert pool.allocate() != page or not remembered


def test_the_longest_idle_page_is_evicted_first():
  pool = paged_kv.PagePool(4, SIZE)
  a, b, c, d = known(pool, b'a', b'b', b'c', b'd')
  for page in (c, a, d, b):
    pool.release(page)
  pool.find(b'c')  # used again: now the youngest
  pool.release(c)
  evicted = [pool.allocate() for _ in range(4)]
  assert evicted == [a, d, b, c]
  assert all(pool.find(name) is None for name in (b'a', b'b', b'c', b'd'))


def test_free_pages_go_before_idle_ones_and_owned_ones_stay():
  pool = paged_kv.PagePool(3, SIZE)
  a, b = known(pool, b'a', b'b')
  pool.release(a)
  assert pool.allocate() not in (a, b)
  assert pool.allocate() == a
  assert pool.find(b'b')[0] == b
  with pytest.raises(paged_kv.OutOfPagesError):
    pool.allocate()


def test_an_evicted_page_can_be_known_again():
  pool = paged_kv.PagePool(1, SIZE)
  (a,) = known(pool, b'a')
  pool.release(a)
  (again,) = known(pool, b'b')
  assert again == a
  assert pool.find(b'a') is None
  assert pool.find(b'b')[0] == a


def test_the_first_page_of_equal_content_stays():
  pool = paged_kv.PagePool(2, SIZE)
  first, second = known(pool, b'a', b'a')
  pool.release(second)
  assert pool.available == 1
  assert pool.allocate() == second  # free at once: nobody can find it
  assert pool.find(b'a')[0] == first


def test_routes_live_with_their_page():
  """Case 8: a prefix hit brings the routes that were recorded for it."""
  pool = paged_kv.PagePool(2, SIZE)
  for value, name in enumerate((b'a', b'b')):
    pool.remember(pool.allocate(), name, routes(value))
  for value, name in enumerate((b'a', b'b')):
    np.testing.assert_array_equal(pool.find(name)[1], routes(value))


def test_counters():
  pool = paged_kv.PagePool(4, SIZE)
  pages = known(pool, b'a', b'b', b'c')
  assert (pool.hits, pool.misses, pool.peak) == (0, 3, 3)
  for page in pages:
    pool.release(page)
  assert pool.find(b'nothing') is None
  assert (pool.hits, pool.misses, pool.peak) == (0, 3, 3)
  pool.find(b'a')
  pool.find(b'a')
  assert (pool.hits, pool.misses, pool.peak, pool.in_use) == (2, 3, 3, 1)


def test_forgetting_all_frees_idle_pages():
  pool = paged_kv.PagePool(3, SIZE)
  a, b, c = known(pool, b'a', b'b', b'c')
  for page in (a, b):
    pool.release(page)
  pool.forget_all()
  assert all(pool.find(name) is None for name in (b'a', b'b', b'c'))
  assert (pool.in_use, pool.available) == (1, 2)
  pool.release(c)
  assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]


def test_random_traffic_keeps_the_books():
  rng = np.random.default_rng(0)
  pool = paged_kv.PagePool(12, SIZE)
  owned, number = [], 0
  for _ in range(3000):
    match rng.integers(4):
      case 0 if len(set(owned)) < 12:
        owned.append(pool.allocate())
      case 1 if owned:
        page = owned[rng.integers(len(owned))]
        if page not in pool._key_of:
          pool.remember(page, b'%d' % number, routes(number % 99))
          number += 1
      case 2 if owned:
        pool.release(owned.pop(rng.integers(len(owned))))
      case 3 if number:
        name = rng.integers(number)
        found = pool.find(b'%d' % name)
        if found is not None:
          owned.append(found[0])
          assert (found[1] == name % 99).all()
    assert pool.in_use == len(set(owned))
    assert pool.available == 12 - len(set(owned))
  assert pool.hits > 50


def test_a_key_depends_on_every_earlier_token_and_on_the_weights():
  """Case 9: pages of other weights are never found."""
  tokens = list(range(30))
  keys = paged_kv.page_keys(tokens, SIZE, '0 a')
  assert len(keys) == 3  # of full pages only
  assert paged_kv.page_keys(tokens[:16], SIZE, '0 a') == keys[:2]
  assert paged_kv.page_keys(np.array(tokens), SIZE, '0 a') == keys
  assert paged_kv.page_keys(tokens[:7], SIZE, '0 a') == []
  for place in range(24):
    changed = [*tokens]
    changed[place] += 1
    other = paged_kv.page_keys(changed, SIZE, '0 a')
    for page, (a, b) in enumerate(zip(keys, other)):
      assert (a == b) == (page < place // SIZE)
  for weights in ('1 a', '0 b', '-1 a', '0 ', ''):
    assert not set(keys) & set(paged_kv.page_keys(tokens, SIZE, weights))
  # Equal pages at other places are other pages.
  repeated = paged_kv.page_keys([5] * 24, SIZE, '0 a')
  assert len(set(repeated)) == 3
