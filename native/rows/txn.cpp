#include "txn.hpp"

#include <algorithm>

namespace ray_pipe::rows {

// --- reading --------------------------------------------------------------------------------------

Get::Get(Txn& txn, Table& table, int64_t key, bool recorded)
    : recorded_(recorded), txn_(&txn), table_(&table), key_(key), hash_(table.hash(key)) {
  segment_ = &table.segment(hash_);
  bucket_ = segment_->home(hash_);
  prefetch(segment_->buckets + bucket_);
}

bool Get::step() { return state_ == State::bucket ? bucket_step() : version_step(); }

bool Get::bucket_step() {
  const Bucket& bucket = segment_->buckets[bucket_];
  const uint64_t header = bucket.header.load(std::memory_order_acquire);  // before the slots
  if (!candidates_) {
    if (probes_ == 0) home_header_ = header;
    candidates_ = matches(bucket, tag_of(hash_));
  }
  if (candidates_) {
    Word& slot = segment_->buckets[bucket_].slots[__builtin_ctz(candidates_)];
    word_ = slot.load(std::memory_order_acquire);
    found.slot = &slot;
    version_ = version_of(word_);
    if (word_ >> 48 != tag_of(hash_)) {  // returned or reused since `matches`
      candidates_ &= candidates_ - 1;
      return false;
    }
    prefetch_lines(version_, table_->full_bytes());
    state_ = State::version;
    return false;
  }
  return next_bucket(header);
}

// Overflow bits may be set everywhere: one tour is the end.
bool Get::next_bucket(uint64_t header) {
  ++probes_;
  if ((header & kOverflow) && (probes_ < segment_->num_buckets || MUTANT(no_probe_bound))) {
    bucket_ = segment_->after(bucket_);
    prefetch(segment_->buckets + bucket_);
    bump(txn_->worker_.counters.probes);
    return false;
  }
  found = {};
  if (recorded_)
    txn_->headers_.push_back({&segment_->buckets[segment_->home(hash_)].header, home_header_});
  return true;
}

bool Get::version_step() {
  if (version_->key != key_) {
    candidates_ &= candidates_ - 1;
    state_ = State::bucket;
    return !candidates_ &&
           next_bucket(segment_->buckets[bucket_].header.load(std::memory_order_acquire));
  }
  if (const Txn::Write* mine = txn_->staged(found.slot, key_)) {
    found.row = mine->fresh->absent() ? nullptr : mine->fresh;
    return true;
  }
  if (version_->stamp() > txn_->snapshot_) {
    if (!MUTANT(head_recorded)) txn_->doomed_ = true;
    version_ = version_->next;
    if (version_) {
      state_ = State::older;
      prefetch_lines(version_, table_->full_bytes());
      return false;
    }
  }
  found.row = version_ && !version_->absent() ? version_ : nullptr;
  if (recorded_) txn_->reads_.push_back({found.slot, word_ & ~kLock});
  return true;
}

// --- writing --------------------------------------------------------------------------------------

void Txn::begin(uint64_t snapshot) {
  snapshot_ = stamp = snapshot;
  doomed_ = false;
  trouble = Status::ok;
  waiting = nullptr;
  reads_.clear();
  headers_.clear();
  writes_.clear();
}

// A placeholder of ours may have been returned and its slot taken again, for another key of ours:
// the first write has lost its slot, and this transaction its chance.
Txn::Write* Txn::staged(const Word* slot, int64_t key) {
  for (Write& w : writes_)
    if (w.slot == slot) {
      if (w.key == key) return &w;
      doomed_ = true;
    }
  return nullptr;
}

void Txn::refresh(Get& get) {
  if (!get.found.slot) return;
  if (const Write* mine = staged(get.found.slot, get.key_))
    get.found.row = mine->fresh->absent() ? nullptr : mine->fresh;
}

Version* Txn::stage(Get& get, int size_class) {
  if (!get.found.slot && !insert(get)) return nullptr;
  Write* before = staged(get.found.slot, get.key_);
  if (!before) {
    writes_.push_back({get.found.slot, nullptr, get.table_, get.key_, 0});  // may throw, holding nothing
    before = &writes_.back();
  }
  Version* fresh = store_.allocate(worker_, size_class, get.found.row == nullptr);
  if (!fresh) {
    trouble = Status::needs_memory;
    trouble_table = get.table_;
    trouble_class = size_class;
    trouble_insert = get.found.row == nullptr;
    if (!before->fresh) writes_.pop_back();
    return nullptr;
  }
  if (before->fresh) store_.release(worker_, before->fresh);
  before->fresh = fresh;
  return fresh;
}

Version* Txn::write(Get& get, uint8_t alive) {
  return stage(get, get.table_->class_of(alive));
}

Version* Txn::write_header(Get& get, uint16_t flags) {
  Version* fresh = stage(get, get.table_->class_of(flags));
  if (!fresh) return nullptr;
  fresh->set(0, flags);
  fresh->next = nullptr;
  fresh->key = get.key_;
  fresh->accumulator = 0;
  fresh->recency.store(kNoRecency, std::memory_order_relaxed);
  return fresh;
}

// Takes a slot for a key that has none, as a placeholder that reads as absent. Sets get.found.slot.
bool Txn::insert(Get& get) {
  Segment& segment = *get.segment_;
  const uint64_t tag = tag_of(get.hash_);
  worker_.dead.reserve(worker_.dead.size() + 1);
  Version* holder = store_.allocate(worker_, get.table_->class_of(kTombstone), true);
  const bool reserved = holder && segment.reserve();
  if (!reserved) {
    trouble = holder ? Status::needs_index : Status::needs_memory;
    trouble_hash = get.hash_;
    trouble_buckets = segment.num_buckets;
    trouble_table = get.table_;
    trouble_class = get.table_->class_of(kTombstone);
    trouble_insert = true;
    if (holder) store_.release(worker_, holder);
    return false;
  }
  holder->set(0, kTombstone | kPlaceholder);
  holder->next = nullptr;
  holder->key = get.key_;
  holder->recency.store(kNoRecency, std::memory_order_relaxed);

  const uint32_t home = segment.home(get.hash_);
  Word& lock = segment.buckets[home].header;
  uint64_t before = lock.load(std::memory_order_relaxed);
  for (;;) {
    before &= ~kLock;
    if (lock.compare_exchange_weak(before, before | kLock, std::memory_order_acquire)) break;
    relax();
  }
  POINT();
  // The key may have come since: search the whole chain again, and remember the first empty slot.
  Word* mine = nullptr;
  uint32_t b = home, empty_at = ~0u;
  for (uint32_t probes = 0; probes < segment.num_buckets; ++probes, b = segment.after(b)) {
    Bucket& bucket = segment.buckets[b];
    for (Word& slot : bucket.slots) {
      const uint64_t word = slot.load(std::memory_order_acquire);
      if (word == 0 && empty_at == ~0u) empty_at = probes;
      if (word >> 48 == tag && version_of(word)->key == get.key_) mine = &slot;
    }
    if (mine || !(bucket.header.load(std::memory_order_acquire) & kOverflow)) break;
  }
  const bool present = mine != nullptr;
  b = home;
  for (uint32_t probes = 0; !mine && probes < segment.num_buckets; ++probes) {
    Bucket& bucket = segment.buckets[b];
    for (Word& slot : bucket.slots) {
      uint64_t none = 0;
      if (slot.load(std::memory_order_relaxed) == 0 &&
          slot.compare_exchange_strong(none, word_of(tag, holder), std::memory_order_acq_rel)) {
        mine = &slot;
        break;
      }
    }
    if (!mine) bucket.header.fetch_or(kOverflow, std::memory_order_acq_rel);
    b = segment.after(b);
  }
  POINT();
  if (present || !mine || MUTANT(insert_keeps_header)) {
    lock.fetch_and(~kLock, std::memory_order_release);
  } else if (MUTANT(plain_unlock)) {
    lock.store(before + kCount, std::memory_order_release);
  } else {
    // An addition: a plain store would lose the overflow bit that a neighbour sets meanwhile.
    const uint64_t after = lock.fetch_add(kCount - kLock, std::memory_order_acq_rel) - kLock;
    for (Read& h : headers_)
      if (h.word == &lock && (h.value | kOverflow) == (after | kOverflow))
        h.value = after + kCount;
  }
  if (present || !mine) {
    segment.release();
    store_.release(worker_, holder);
  } else {
    worker_.dead.push_back({get.table_, get.key_});  // to be looked at if this does not commit
  }
  if (!mine) {  // cannot happen: the reservation left an empty slot
    trouble = Status::needs_index;
    trouble_hash = get.hash_;
    trouble_buckets = segment.num_buckets;
    trouble_table = get.table_;
    return false;
  }
  get.found.slot = mine;
  return true;
}

}  // namespace ray_pipe::rows
