// The row store under threads, with every rule broken on purpose in turn. A program of its own, so
// that the sanitisers see nothing but the store; `make test-tsan` and tests/unit/test_row_stress.py.
//
//   g++ -std=c++20 -O1 -g -pthread -DRAY_PIPE_ROWS_TESTING native/rows/stress.cpp -o stress
//   stress [--seconds N] [--limit N] [--mutant NAME] TEST...
//
// Ends with 0, with 1 and a reason, or with 3 when a test does not end within the limit.
#include <cstdio>
#include <cstdlib>
#include <chrono>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <tuple>

// The store itself, in this translation unit.
#include "bulk.cpp"
#include "commit.cpp"
#include "lanes.cpp"
#include "maintain.cpp"
#include "memory.cpp"
#include "optimize.cpp"
#include "procedures.cpp"
#include "prune.cpp"
#include "recall.cpp"
#include "recency.cpp"
#include "store.cpp"
#include "table.cpp"
#include "txn.cpp"

namespace ray_pipe::rows {

std::atomic<Mutant> mutant{Mutant::none};
std::atomic<int> yield_every{12};
std::atomic<int> fail_every{0};

namespace {
constexpr float kEven[8] = {1, 1, 1, 1, 1, 1, 1, 1};  // weights of columns
thread_local std::minstd_rand dice{std::random_device{}()};
}
void protocol_point() {
  const int every = yield_every.load(std::memory_order_relaxed);
  if (!every || dice() % static_cast<unsigned>(every)) return;
  if (dice() % 8) std::this_thread::yield();
  else std::this_thread::sleep_for(std::chrono::microseconds(20));
}
uint64_t draw() { return dice(); }
bool allocation_fails() {
  const int every = fail_every.load(std::memory_order_relaxed);
  return every && dice() % static_cast<unsigned>(every) == 0;
}

namespace {

using Clock = std::chrono::steady_clock;
double seconds = 1.0, limit_s = 60.0;
std::atomic<bool> failed{false};

void expect(bool good, const char* what) {
  if (good || failed.exchange(true)) return;
  std::printf("violated: %s\n", what);
  std::fflush(stdout);
}

struct Deadline {
  Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                             std::chrono::duration<double>(seconds));
  bool passed() const { return failed.load() || Clock::now() > end; }
};

StoreConfig small(size_t capacity = size_t{16} << 20) {
  StoreConfig c;
  c.capacity = capacity;
  c.slab_bytes = 16 << 10;
  c.huge = false;
  return c;
}

TableConfig words(uint64_t expected = 0, uint64_t seed = 1) {  // a row is one 64 bit word
  TableConfig c;
  c.name = "t";
  c.dim = 2;
  c.seed = seed;
  c.expected_rows = expected;
  return c;
}

uint64_t value_of(const Table& table, const Version* row) {
  if (!row) return 0;
  float w[2];
  uint64_t value;
  table.read(row, w);
  std::memcpy(&value, w, 8);
  return value;
}

void fill_word(const Table& table, Version* fresh, int64_t key, uint64_t value) {
  float w[2];
  std::memcpy(w, &value, 8);
  table.fill(fresh, key, w, 1);
}

template <class Work>
void on_threads(int n, Work work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i) threads.emplace_back(work, i);
  for (auto& t : threads) t.join();
}

// Keys that share one segment: of two buckets, so slots and homes are fought for.
std::vector<int64_t> crowded_keys(Table& table, size_t n, uint64_t segment = 5) {
  std::vector<int64_t> keys;
  for (int64_t k = 1; keys.size() < n; ++k)
    if (table.hash(k) >> 58 == segment) keys.push_back(k);
  return keys;
}

// --- histories: what was read must be what a replay in the order of stamps would read -------------

enum class Kind : uint8_t { read, write, erase };
struct Op {
  Kind kind;
  int64_t key;
  uint64_t value;  // as read
};
struct Deed {
  uint64_t id = 0, stamp = 0;
  bool wrote = false, ok = false;
  std::vector<Op> ops;
};

void act(Table& table, Txn& txn, Get& get, Deed& deed, Op& op) {
  op.value = value_of(table, get.found.row);
  if (op.kind == Kind::write) {
    if (Version* fresh = txn.write(get, 1)) fill_word(table, fresh, op.key, deed.id);
    deed.wrote = true;
  } else if (op.kind == Kind::erase && get.found.row) {
    txn.write_header(get, kTombstone);
    deed.wrote = true;
  }
}

Body play(Txn& txn, Table* table, Deed* deed) {
  deed->wrote = false;
  for (Op& op : deed->ops) {
    Get get = co_await Read(txn, *table, op.key);
    act(*table, txn, get, *deed, op);
    if (txn.trouble != Status::ok) co_return txn.trouble;
  }
  co_return Status::ok;
}

void replay(std::vector<Deed> deeds) {
  std::sort(deeds.begin(), deeds.end(), [](const Deed& a, const Deed& b) {
    return std::pair(a.stamp, !a.wrote) < std::pair(b.stamp, !b.wrote);
  });
  std::map<int64_t, uint64_t> model;
  for (size_t i = 0; i < deeds.size(); ++i) {
    const Deed& d = deeds[i];
    expect(!d.wrote || i == 0 || !deeds[i - 1].wrote || deeds[i - 1].stamp < d.stamp,
           "two commits have one stamp");
    for (const Op& op : d.ops) {
      expect(op.value == model[op.key], "a read differs from the replay in stamp order");
      if (op.kind == Kind::write) model[op.key] = d.id;
      if (op.kind == Kind::erase) model[op.key] = 0;
    }
  }
}

enum class How { sequential, step, group, mixed };

void history(How how, size_t num_keys, bool crowded, unsigned erase_percent, int batch = 8) {
  const Deadline deadline;
  for (uint64_t round = 0; !deadline.passed(); ++round) {
    Store store(small());
    Table& table = store.add_table(words(0, round));
    std::vector<int64_t> keys = crowded_keys(table, crowded ? num_keys : 1);
    while (keys.size() < num_keys) keys.push_back(static_cast<int64_t>(keys.size()) * 7919);
    std::vector<Deed> all;
    std::mutex mutex;
    std::atomic<uint64_t> next_id{1};
    on_threads(3, [&](int) {
      std::vector<Deed> mine;
      for (int turn = 0; turn < 12 && !failed.load(); ++turn) {
        std::vector<Deed> deeds(16);
        for (Deed& d : deeds) {
          d.id = next_id.fetch_add(1);
          std::set<int64_t> used;  // in a group the reads come before the writes
          const unsigned width = dice() % 4 == 0 ? 4 : 2;
          for (unsigned i = 0; i < width; ++i) {
            const int64_t key = keys[dice() % keys.size()];
            if (!used.insert(key).second) continue;
            const unsigned roll = dice() % 100;
            const Kind kind = roll < erase_percent ? Kind::erase
                              : roll < 55          ? Kind::write
                                                   : Kind::read;
            d.ops.push_back({kind, key, 0});
          }
          if (dice() % 6 == 0)
            for (Op& op : d.ops) op.kind = Kind::read;
        }
        const How now = how == How::mixed ? static_cast<How>(dice() % 3) : how;
        if (now == How::group) {
          const Borrowed worker(store);
          for (Deed& d : deeds) {
            std::vector<int64_t> at;
            for (const Op& op : d.ops) at.push_back(op.key);
            d.ok = grouped(
                       store, *worker, table, at.data(), at.size(),
                       [&](Txn& txn, Get& get, size_t i) {
                         if (i == 0) d.wrote = false;
                         act(table, txn, get, d, d.ops[i]);
                       },
                       true, &d.stamp) == Status::ok;
          }
        } else {
          std::vector<uint8_t> statuses(deeds.size());
          std::vector<uint64_t> stamps(deeds.size());
          run_lanes(store, deeds.size(), now == How::step ? batch : 1, now == How::sequential,
                    statuses.data(),
                    [&](Txn& txn, size_t t) { return play(txn, &table, &deeds[t]); },
                    stamps.data());
          for (size_t t = 0; t < deeds.size(); ++t) {
            deeds[t].stamp = stamps[t];
            deeds[t].ok = statuses[t] == 0;
          }
        }
        for (Deed& d : deeds)
          if (d.ok) mine.push_back(std::move(d));
        // A reader with a snapshot of its own, by each way of reading many.
        SnapshotEntry& snapshot = store.open_snapshot();
        for (const size_t group : {size_t{1}, size_t{8}}) {
          std::vector<float> out(2 * keys.size());
          std::vector<uint8_t> seen(keys.size());
          multi_get(store, table, keys.data(), keys.size(), out.data(), seen.data(), &snapshot,
                    group);
          Deed d;
          d.stamp = snapshot.stamp.load();
          for (size_t i = 0; i < keys.size(); ++i) {
            uint64_t value;
            std::memcpy(&value, &out[2 * i], 8);
            d.ops.push_back({Kind::read, keys[i], seen[i] ? value : 0});
          }
          mine.push_back(std::move(d));
        }
        store.close_snapshot(snapshot);
      }
      const std::lock_guard lock(mutex);
      all.insert(all.end(), mine.begin(), mine.end());
    });
    replay(std::move(all));
  }
}

// --- tests by their number in the specification --------------------------------------------------------

Body increment(Txn& txn, Table* table, const int64_t* keys, unsigned width) {
  for (unsigned i = 0; i < width; ++i) {
    Get get = co_await Read(txn, *table, keys[i]);
    const uint64_t before = value_of(*table, get.found.row);
    Version* fresh = txn.write(get, 1);
    if (!fresh) co_return txn.trouble;
    fill_word(*table, fresh, keys[i], before + 1);
  }
  co_return Status::ok;
}

// 1, 6, 16: no increment is lost, a key is inserted once, hot keys make progress.
void lost_update(unsigned width = 2, int batch = 8) {
  const Deadline deadline;
  for (uint64_t round = 0; !deadline.passed(); ++round) {
    Store store(small());
    Table& table = store.add_table(words(0, round));
    std::atomic<uint64_t> done{0};
    on_threads(3, [&](int) {
      constexpr size_t kCount = 64;
      std::vector<int64_t> keys(kCount * width);
      std::vector<uint8_t> statuses(kCount);
      for (int turn = 0; turn < 3; ++turn) {
        for (auto& k : keys) k = static_cast<int64_t>(dice() % 8);
        const RunResult r = run_lanes(
            store, kCount, batch, false, statuses.data(),
            [&](Txn& txn, size_t t) { return increment(txn, &table, &keys[t * width], width); });
        expect(r.ok == kCount, "a transaction gave up");
        done.fetch_add(r.ok * width);
      }
    });
    uint64_t sum = 0;
    const Borrowed worker(store);
    const Batch scope(store, *worker);
    for (int64_t k = 0; k < 8; ++k)
      if (const Word* slot = table.find(table.hash(k), k))
        sum += value_of(table, version_of(slot->load()));
    expect(sum == done.load(), "increments were lost");
    expect(table.rows.load() <= 8, "a key was inserted twice");
  }
}

// 2, 7: pairs of rows that always add up, read while they change and versions are freed.
void torn_snapshot() {
  const Deadline deadline;
  Store store(small());
  Table& table = store.add_table(words());
  constexpr int64_t kPairs = 16;
  std::atomic<bool> stop{false};
  const auto move = [&](Worker& worker, int64_t pair, uint64_t by) {
    const int64_t keys[] = {2 * pair, 2 * pair + 1};
    grouped(store, worker, table, keys, 2, [&](Txn& txn, Get& get, size_t i) {
      const uint64_t before = value_of(table, get.found.row);
      if (Version* fresh = txn.write(get, 1))
        fill_word(table, fresh, keys[i], i ? before - by : before + by);
    });
  };
  {
    const Borrowed worker(store);
    for (int64_t p = 0; p < kPairs; ++p) move(*worker, p, 1);
  }
  on_threads(3, [&](int me) {
    std::vector<int64_t> keys(2 * kPairs);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
    std::vector<float> out(4 * kPairs), again(4 * kPairs);
    std::vector<uint8_t> seen(2 * kPairs);
    while (!deadline.passed()) {
      if (me != 0) {
        const Borrowed worker(store);
        for (int i = 0; i < 50; ++i) move(*worker, static_cast<int64_t>(dice() % kPairs), dice());
        continue;
      }
      SnapshotEntry& snapshot = store.open_snapshot();
      multi_get(store, table, keys.data(), keys.size(), out.data(), seen.data(), &snapshot, 16);
      for (int64_t p = 0; p < kPairs; ++p) {
        uint64_t a, b;
        std::memcpy(&a, &out[static_cast<size_t>(4 * p)], 8);
        std::memcpy(&b, &out[static_cast<size_t>(4 * p + 2)], 8);
        expect(a + b == 0, "a snapshot saw half a commit");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));  // a long reader
      multi_get(store, table, keys.data(), keys.size(), again.data(), seen.data(), &snapshot, 1);
      expect(!std::memcmp(out.data(), again.data(), 4 * out.size()), "a snapshot changed");
      store.close_snapshot(snapshot);
    }
  });
}

// 9: inserts that overflow, from several threads, then every key must be found.
void overflow() {
  const Deadline deadline;
  for (uint64_t round = 0; !deadline.passed(); ++round) {
    Store store(small(size_t{2} << 20));
    Table& table = store.add_table(words(0, round));
    const std::vector<int64_t> keys = crowded_keys(table, 11, round % kSegments);
    std::atomic<size_t> next{0};
    on_threads(3, [&](int) {
      const Borrowed worker(store);
      for (size_t i; (i = next.fetch_add(1)) < keys.size();)
        grouped(store, *worker, table, &keys[i], 1, [&](Txn& txn, Get& get, size_t) {
          if (Version* fresh = txn.write(get, 1)) fill_word(table, fresh, keys[i], 1);
        });
    });
    expect(store.growths.load() == 0, "the test means to fill two buckets");
    const Borrowed worker(store);
    const Batch scope(store, *worker);
    for (const int64_t k : keys) expect(table.find(table.hash(k), k), "an inserted key is lost");
  }
}

// 12: at the cap there is an answer, in bounded time, and life after it.
void full() {
  yield_every.store(0);
  Store store(small(size_t{1} << 20));
  Table& table = store.add_table(words());
  const Borrowed worker(store);
  const auto write = [&](int64_t key) {
    return grouped(store, *worker, table, &key, 1, [&](Txn& txn, Get& get, size_t) {
      if (Version* fresh = txn.write(get, 1)) fill_word(table, fresh, key, 7);
    });
  };
  // Overflow bits in both buckets of every segment, all keys gone again.
  for (int64_t from = 0; from < 20; ++from) {
    std::vector<int64_t> some;
    for (int64_t k = 0; k < 400; ++k) some.push_back(from * 1000 + k);
    for (const int64_t k : some) expect(write(k) == Status::ok, "there is room");
    rows::remove(store, table, some.data(), some.size());
  }
  for (int64_t k = -3000; k < 0; ++k) {
    float out[2];
    uint8_t seen;
    multi_get(store, table, &k, 1, out, &seen, nullptr, 1);
    expect(!seen, "an absent key is absent");
  }
  int64_t n = 0;
  while (write(n) == Status::ok && n < 1000000) ++n;
  expect(n > 1000 && n < 100000, "the store is full at some point");
  for (Segment& s : table.segments)
    expect(s.used.load() <= s.limit, "more slots are used than may be reserved");
  for (int i = 0; i < 3; ++i) expect(write(n) == Status::full, "full stays full");
  for (int64_t k = 0; k < n; k += 7) expect(write(k) == Status::ok, "updates go on");
  std::vector<int64_t> some;
  for (int64_t k = 0; k < n; k += 2) some.push_back(k);
  expect(rows::remove(store, table, some.data(), some.size()) == some.size(), "rows go");
  int64_t back = 0;
  while (back < n / 4 && write(2000000 + back) == Status::ok) ++back;
  expect(back == n / 4, "inserts work after deletes");
}

// A slot that was returned while a transaction meant to write to it, and taken for another key.
void reused_slot() {
  Store store(small());
  Table& table = store.add_table(words());
  std::vector<int64_t> first, second;  // by home, in one segment of two buckets
  for (int64_t k = 1; first.empty() || second.size() < 8; ++k)
    if (table.hash(k) >> 58 == 5)
      (table.segments[5].home(table.hash(k)) ? second : first).push_back(k);
  const Borrowed a(store), b(store), sweeper(store);
  const auto stage = [&](Txn& txn, int64_t key) {
    Get get = txn.get(table, key);
    while (!get.step()) {
    }
    fill_word(table, txn.write(get, 1), key, 9);
  };
  Txn late(store, *a), other(store, *b);
  const Batch scope(store, *a);
  late.begin(scope.snapshot());
  stage(late, first[0]);
  {
    const Batch there(store, *b);
    other.begin(there.snapshot());
    for (size_t i = 0; i < 7; ++i) stage(other, second[i]);  // fills the second bucket
    (*sweeper).dead.push_back({&table, first[0]});
    store.sweep(*sweeper);
    stage(other, second[7]);  // overflows into the slot that was returned
    expect(late.commit() == Status::conflict, "a row went into another key's slot");
    expect(other.commit() == Status::ok, "the slot's new owner commits");
  }
}

// Two keys of one bucket and one tag: while the first comes and goes, the second is always found.
void equal_tags() {
  const Deadline deadline;
  Store store(small());
  Table& table = store.add_table(words());
  std::map<std::tuple<uint64_t, uint32_t, uint64_t>, int64_t> homes;
  int64_t restless = 0, calm = 0;
  for (int64_t k = 1; !calm; ++k) {
    const uint64_t hash = table.hash(k);
    const auto at = std::tuple(hash >> 58, table.segment(hash).home(hash), tag_of(hash));
    const auto [before, fresh] = homes.emplace(at, k);
    if (!fresh) restless = before->second, calm = k;
  }
  const auto insert = [&](Worker& worker, int64_t key) {
    grouped(store, worker, table, &key, 1, [&](Txn& txn, Get& get, size_t) {
      if (Version* fresh = txn.write(get, 1)) fill_word(table, fresh, key, 7);
    });
  };
  {
    const Borrowed worker(store);
    insert(*worker, restless);
    insert(*worker, calm);
  }
  yield_every.store(2);
  std::atomic<bool> over{false};
  on_threads(3, [&](int me) {
    const Borrowed worker(store);
    while (me == 0 ? !deadline.passed() : !over.load()) {
      if (me == 0) {
        rows::remove(store, table, &restless, 1);
        insert(*worker, restless);
        continue;
      }
      for (const size_t group : {1, 32}) {
        float out[2];
        uint8_t seen = 0;
        multi_get(store, table, &calm, 1, out, &seen, nullptr, group);
        expect(seen, "a key was lost behind another of its tag");
      }
    }
    if (me == 0) over.store(true);
  });
}

// An insert that is off the core between its placeholder and the end of its lock: others use the
// placeholder meanwhile. Who saw the lock before the placeholder may not rely on what it saw.
void slow_insert() {
  Store store(small());
  Table& table = store.add_table(words());
  const int64_t asked = 1;
  int64_t other = 2;  // of another segment
  while (table.hash(other) >> 58 == table.hash(asked) >> 58) ++other;
  const uint64_t hash = table.hash(asked);
  Bucket& home = table.segment(hash).buckets[table.segment(hash).home(hash)];
  const Borrowed worker(store);
  const auto read = [&](Txn& txn, int64_t key) {
    Get get = txn.get(table, key);
    while (!get.step()) {
    }
    return get;
  };
  const Batch scope(store, *worker);
  Txn early(store, *worker), quick(store, *worker);
  early.begin(scope.snapshot());
  quick.begin(scope.snapshot());

  home.header.fetch_or(kLock);  // the insert begins
  expect(!read(early, asked).found.slot, "nothing is there yet");
  Get elsewhere = read(early, other);
  fill_word(table, early.write(elsewhere, 1), other, 7);
  Version* holder = store.allocate(*worker, table.class_of(kTombstone), true);
  holder->set(0, kTombstone | kPlaceholder);
  holder->next = nullptr;
  holder->key = asked;
  holder->recency.store(kNoRecency);
  expect(table.segment(hash).reserve(), "there is room");
  home.slots[0].store(word_of(tag_of(hash), holder));  // and is pushed off the core here

  Get found = read(quick, asked);
  expect(found.found.slot == &home.slots[0], "the placeholder can be used");
  fill_word(table, quick.write(found, 1), asked, 8);
  expect(quick.commit() == Status::ok, "who met the placeholder commits");
  expect(early.commit() == Status::conflict, "a commit relied on a row not being there that was");
  home.header.fetch_add(kCount - kLock);
}

// 13: many times the capacity passes through; slots and bytes stay.
void churn() {
  const Deadline deadline;
  Store store(small(size_t{4} << 20));
  Table& table = store.add_table(words(2000));
  yield_every.store(500);
  std::atomic<int64_t> next{0};
  while (!deadline.passed() || (next.load() <= 10 * 4096 && !failed.load())) {  // ten times what fits
    on_threads(2, [&](int) {
      const Borrowed worker(store);
      for (int turn = 0; turn < 20; ++turn) {
        const int64_t from = next.fetch_add(50);
        int64_t keys[50];
        for (int64_t i = 0; i < 50; ++i) keys[i] = from + i;
        const Status s =
            grouped(store, *worker, table, keys, 50, [&](Txn& txn, Get& get, size_t i) {
              if (Version* fresh = txn.write(get, 1)) fill_word(table, fresh, keys[i], 1);
            });
        expect(s == Status::ok, "there is room for a row that replaces another");
        rows::remove(store, table, keys, 50);
      }
    });
    expect(store.arena.used_bytes() < size_t{1} << 20, "memory grows with churn");
    expect(table.rows.load() == 0, "rows that went are counted");
  }
}

// 14: growth under load. No key is lost; a scan sees each key that was there once.
void growth() {
  const Deadline deadline;
  for (uint64_t round = 0; !deadline.passed(); ++round) {
    Store store(small(size_t{32} << 20));
    Table& table = store.add_table(words(0, round));
    constexpr int64_t kOld = 2000, kNew = 3000;
    const auto insert = [&](Worker& worker, int64_t key) {
      grouped(store, worker, table, &key, 1, [&](Txn& txn, Get& get, size_t) {
        if (Version* fresh = txn.write(get, 1))
          fill_word(table, fresh, key, static_cast<uint64_t>(key) + 1);
      });
    };
    {
      const Borrowed worker(store);
      for (int64_t k = 0; k < kOld; ++k) insert(*worker, k);
    }
    on_threads(3, [&](int me) {
      if (me) {
        const Borrowed worker(store);
        for (int64_t k = kOld + me - 1; k < kOld + kNew; k += 2) insert(*worker, k);
        return;
      }
      std::vector<int64_t> keys(257);
      std::vector<uint64_t> stamps(257);
      std::vector<uint32_t> recency(257);
      std::vector<char> records(257 * record_bytes(table));
      std::map<int64_t, int> seen;
      ScanResult r;
      for (SnapshotEntry& snapshot = store.open_snapshot(); !r.done;) {
        r = scan(store, table, &snapshot, r.cursor, 257, keys.data(), stamps.data(),
                 recency.data(), records.data());
        for (uint64_t i = 0; i < r.count; ++i) ++seen[keys[i]];
        if (r.done) store.close_snapshot(snapshot);
      }
      for (int64_t k = 0; k < kOld; ++k) expect(seen[k] == 1, "a scan sees each key once");
      for (const auto& [key, times] : seen) expect(times == 1, "a scan sees no key twice");
    });
    expect(store.growths.load() > 0, "it grew");
    std::vector<int64_t> keys(kOld + kNew);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
    std::vector<float> out(2 * keys.size());
    std::vector<uint8_t> present(keys.size());
    multi_get(store, table, keys.data(), keys.size(), out.data(), present.data(), nullptr, 32);
    for (size_t i = 0; i < keys.size(); ++i) {
      uint64_t value;
      std::memcpy(&value, &out[2 * i], 8);
      expect(present[i] && value == i + 1, "a key is lost by growth");
    }
  }
}

// 17: an allocation that fails ends its own transaction only.
void bad_alloc() {
  const Deadline deadline;
  Store store(small());
  Table& table = store.add_table(words());
  fail_every.store(9);
  uint64_t done = 0, ended = 0;
  while (!deadline.passed() && ended < 2000) {
    std::vector<int64_t> keys(64);
    std::vector<uint8_t> statuses(32);
    for (auto& k : keys) k = static_cast<int64_t>(dice() % 4096);
    const RunResult r = run_lanes(store, 32, 8, false, statuses.data(), [&](Txn& txn, size_t t) {
      return increment(txn, &table, &keys[2 * t], 2);
    });
    expect(r.ok + r.full == 32, "every transaction has an end");
    done += r.ok;
    ended += r.full;
  }
  fail_every.store(0);
  expect(ended > 0 && done > 0, "some fail, some do not");
  uint64_t sum = 0;
  const Borrowed worker(store);
  const Batch scope(store, *worker);
  for (int64_t k = 0; k < 4096; ++k)
    if (const Word* slot = table.find(table.hash(k), k))
      sum += value_of(table, version_of(slot->load()));
  expect(sum == 2 * done, "a transaction that ended left a trace");
}

// Recency, pruning and slabs beside training: counts agree at the end.
void training() {
  const Deadline deadline;
  TableConfig c;
  c.name = "rows";
  c.dim = 8;
  c.chunks = 4;
  c.optimizer = Optimizer::row_adagrad;
  c.init = Init::uniform;
  c.init_scale = 0.1;
  c.lru = true;
  c.max_rows = 600;
  Store store(small());
  Table& table = store.add_table(c);
  on_threads(3, [&](int me) {
    std::vector<int64_t> keys(64);
    std::vector<float> out(64 * 8), g(64 * 8, 0.5f);
    std::vector<uint8_t> seen(64);
    while (!deadline.passed()) {
      for (auto& k : keys) k = static_cast<int64_t>(dice() % 1000);
      lookup(store, table, keys.data(), 64, out.data(), seen.data());
      for (const float x : out) expect(x > -100 && x < 100, "a weight is torn");
      apply(store, table, keys.data(), 64, g.data(), 0.01, nullptr, seen.data());
      if (me == 0 && dice() % 8 == 0) prune(store, table, 1000 + dice() % 800, kEven);
      if (me == 1 && dice() % 32 == 0) compact(store);
    }
  });
  uint64_t rows = 0, chunks = 0, cursor = 0;
  const Borrowed worker(store);
  {
    const Batch scope(store, *worker);
    std::vector<RowAt> found;
    collect(table, scope.snapshot(), cursor, ~size_t{0}, found);
    rows = found.size();
    for (const RowAt& r : found) chunks += static_cast<uint64_t>(__builtin_popcount(r.row->alive()));
  }
  expect(rows == table.rows.load(), "rows are counted");
  expect(chunks == table.alive_chunks.load(), "chunks are counted");
  expect(evict(store, *worker, table, 100000, kIdle) == rows, "every row can be evicted");
}

// A store that is full of the least recently used, and snapshots of it that nobody closes in time:
// rows find room, whatever they hold, and none leaves the order of use but by going.
void full_and_held() {
  const Deadline deadline;
  TableConfig c;
  c.name = "rows";
  c.dim = 16;
  c.optimizer = Optimizer::row_adagrad;
  c.lru = true;
  Store store(small(size_t{2} << 20));
  Table& table = store.add_table(c);
  const auto train = [&](std::vector<int64_t>& keys, std::vector<float>& out,
                         std::vector<float>& g, std::vector<uint8_t>& seen) {
    for (auto& k : keys) k = static_cast<int64_t>(dice() % 100000);
    const LookupResult r = lookup(store, table, keys.data(), 64, out.data(), seen.data());
    expect(r.full == 0, "a snapshot took the room of rows");
    const ApplyResult a = apply(store, table, keys.data(), 64, g.data(), 0.01, nullptr, seen.data());
    expect(a.full == 0, "a snapshot took the room of an update");
  };
  {  // Alone first, where nothing depends on who is faster: full, then held for good.
    std::vector<int64_t> keys(64);
    std::vector<float> out(64 * 16), g(64 * 16, 0.5f);
    std::vector<uint8_t> seen(64);
    for (int i = 0; i < 600; ++i) train(keys, out, g, seen);
    SnapshotEntry& held = store.open_snapshot();
    for (int i = 0; i < 600; ++i) train(keys, out, g, seen);
    store.close_snapshot(held);
    expect(store.snapshots_expired.load() > 0, "the snapshot gave way");
  }
  on_threads(2, [&](int me) {
    std::vector<int64_t> keys(64);
    std::vector<float> out(64 * 16), g(64 * 16, 0.5f);
    std::vector<uint8_t> seen(64);
    SnapshotEntry* held = nullptr;
    while (!deadline.passed()) {
      if (me == 0) {
        train(keys, out, g, seen);
        continue;
      }
      if (held) store.close_snapshot(*held);
      held = &store.open_snapshot();
      const uint64_t until = store.visible.load() + dice() % 1000;  // commits
      try {
        do multi_get(store, table, keys.data(), 64, out.data(), seen.data(), held, 16);
        while (store.visible.load() < until && !deadline.passed());
      } catch (const SnapshotExpired&) {  // as it may: there is a new one in the next round
      }
    }
    if (held) store.close_snapshot(*held);
  });
  std::vector<int64_t> keys(table.rows.load() + 1);
  std::vector<uint64_t> touched(keys.size());
  expect(order(store, table, keys.size(), keys.data(), touched.data()) == table.rows.load(),
         "every row is in the order of use");
  const Borrowed worker(store);
  const uint64_t rows = table.rows.load();
  uint64_t gone = 0;  // one call ends where a full store has no room for a tombstone; the next goes on
  while (const uint64_t some = evict(store, *worker, table, 100000, kIdle)) gone += some;
  if (gone != rows)  // seen once in a loaded suite, cause unknown: say what would tell
    std::fprintf(stderr, "evicted %llu of %llu; one more call evicts %llu\n",
                 static_cast<unsigned long long>(gone), static_cast<unsigned long long>(rows),
                 static_cast<unsigned long long>(evict(store, *worker, table, 100000, kIdle)));
  expect(gone == rows, "every row can be evicted");
}

// Rows that shall go and cannot, since a snapshot holds what they would free: they stay in the order.
void evicted_in_vain() {
  TableConfig c;
  c.name = "rows";
  c.dim = 16;
  c.lru = true;
  Store store(small(size_t{2} << 20));
  Table& table = store.add_table(c);
  std::vector<int64_t> keys(64);
  std::vector<float> out(64 * 16);
  std::vector<uint8_t> seen(64);
  for (int64_t next = 0; next < 100000; next += 64) {
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = next + static_cast<int64_t>(i);
    lookup(store, table, keys.data(), 64, out.data(), seen.data());
  }
  SnapshotEntry& held = store.open_snapshot();
  {
    const Borrowed worker(store);
    while (evict(store, *worker, table, 100000, kIdle)) {}
  }
  const uint64_t rows = table.rows.load();
  expect(rows > 0, "some rows cannot go");
  std::vector<int64_t> ordered(rows + 1);
  std::vector<uint64_t> touched(ordered.size());
  expect(order(store, table, ordered.size(), ordered.data(), touched.data()) == rows,
         "every row is in the order of use");
  store.close_snapshot(held);
}

}  // namespace
}  // namespace ray_pipe::rows

#include "stress_rows.hpp"

namespace ray_pipe::rows {
namespace {

const std::map<std::string, std::function<void()>> kTests = {
    {"history_sequential", [] { history(How::sequential, 12, false, 15); }},
    {"history_step", [] { history(How::step, 12, false, 15); }},
    {"history_group", [] { history(How::group, 12, false, 15); }},
    {"history_mixed", [] { history(How::mixed, 8, false, 15, 16); }},
    {"history_crowded", [] { history(How::mixed, 10, true, 35); }},
    {"lost_update", [] { lost_update(); }},
    {"hot_keys", [] { lost_update(4, 16); }},
    {"torn_snapshot", torn_snapshot},
    {"overflow", overflow},
    {"full", full},
    {"reused_slot", reused_slot},
    {"equal_tags", equal_tags},
    {"slow_insert", slow_insert},
    {"churn", churn},
    {"growth", growth},
    {"bad_alloc", bad_alloc},
    {"training", training},
    {"full_and_held", full_and_held},
    {"evicted_in_vain", evicted_in_vain},
    {"same_beginning", same_beginning},
    {"cells", cells},
};
const std::map<std::string, Mutant> kMutants = {
    {"none", Mutant::none},
    {"head_recorded", Mutant::head_recorded},
    {"stamp_after_validation", Mutant::stamp_after_validation},
    {"unordered_publication", Mutant::unordered_publication},
    {"lane_deregisters", Mutant::lane_deregisters},
    {"no_read_validation", Mutant::no_read_validation},
    {"no_first_committer", Mutant::no_first_committer},
    {"only_last_committer", Mutant::only_last_committer},
    {"plain_unlock", Mutant::plain_unlock},
    {"insert_keeps_header", Mutant::insert_keeps_header},
    {"locked_header_counts", Mutant::locked_header_counts},
    {"late_registration", Mutant::late_registration},
    {"no_reservation", Mutant::no_reservation},
    {"no_probe_bound", Mutant::no_probe_bound},
    {"reused_slot_unchecked", Mutant::reused_slot_unchecked},
    {"failed_unpublished", Mutant::failed_unpublished},
    {"first_candidate_only", Mutant::first_candidate_only},
    {"lane_local_init", Mutant::lane_local_init},
    {"cell_freed_twice", Mutant::cell_freed_twice},
    {"cell_forgotten", Mutant::cell_forgotten},
    {"snapshot_before_rows", Mutant::snapshot_before_rows},
    {"popped_before_commit", Mutant::popped_before_commit},
};

}  // namespace
}  // namespace ray_pipe::rows

int main(int argc, char** argv) {
  using namespace ray_pipe::rows;
  std::vector<std::string> tests;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--seconds") seconds = std::atof(argv[++i]);
    else if (word == "--limit") limit_s = std::atof(argv[++i]);
    else if (word == "--mutant") mutant.store(kMutants.at(argv[++i]));
    else tests.push_back(word);
  }
  if (tests.empty())
    for (const auto& [name, test] : kTests) tests.push_back(name);
  for (const std::string& name : tests) {
    std::atomic<bool> over{false};
    std::thread watchdog([&] {
      const auto limit = Clock::now() + std::chrono::duration<double>(limit_s);
      while (!over.load() && Clock::now() < limit)
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      if (over.load()) return;
      std::printf("%s does not end\n", name.c_str());
      std::fflush(stdout);
      std::_Exit(3);
    });
    yield_every.store(12);
    const auto since = Clock::now();
    kTests.at(name)();
    over.store(true);
    watchdog.join();
    std::printf("%-20s %s %.1f s\n", name.c_str(), failed.load() ? "FAILED" : "ok",
                std::chrono::duration<double>(Clock::now() - since).count());
    std::fflush(stdout);
    if (failed.load()) std::_Exit(1);
  }
  return 0;
}
