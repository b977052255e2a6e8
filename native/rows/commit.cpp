// The commit: a plain function, so that no lock and no stamp is ever held across a suspension.
#include <algorithm>

#include "txn.hpp"

namespace ray_pipe::rows {

namespace {
// An absence that was read while an insert had the bucket locked counts for nothing: the slot may
// have come right after, been used by a third transaction and committed, all under that same lock.
bool same_header(uint64_t now, uint64_t then) {
  if ((then & kLock) && !MUTANT(locked_header_counts)) return false;
  return (now | kOverflow) == (then | kOverflow);
}
}  // namespace

Status Txn::commit() {
  if (writes_.empty()) return Status::ok;
  if (doomed_) {
    abandon();
    return Status::conflict;
  }
  // Nothing below may throw: an unpublished stamp would hang everybody.
  auto& retired = worker_.retired;
  if (retired.capacity() < retired.size() + writes_.size())
    retired.reserve(2 * (retired.size() + writes_.size()));
  worker_.dead.reserve(worker_.dead.size() + writes_.size());
  std::sort(writes_.begin(), writes_.end(),
            [](const Write& a, const Write& b) { return a.slot < b.slot; });
  if (!lock_writes()) {
    abandon();
    return Status::conflict;
  }
  POINT();
  bool valid = MUTANT(stamp_after_validation) ? validate() : true;
  POINT();
  stamp = store_.clock.fetch_add(1) + 1;  // before the reads are checked
  POINT();
  if (!MUTANT(stamp_after_validation)) valid = validate();
  if (!valid) {
    unlock(writes_.size());
    if (!MUTANT(failed_unpublished)) store_.publish(stamp);
    abandon();
    return Status::conflict;
  }
  for (Write& w : writes_) {
    Version* old = version_of(w.locked);
    w.fresh->set(stamp, w.fresh->flags());
    w.fresh->next = old;
    // Under the lock: a touch that comes later sees the new word and repeats.
    if (!(w.fresh->flags() & (kTombstone | kSpilled)))
      w.fresh->recency.store(old->recency.load(), std::memory_order_relaxed);
    POINT();
    w.slot->store((w.locked & ~kAddress) | reinterpret_cast<uint64_t>(w.fresh));
  }
  store_.publish(stamp);
  for (const Write& w : writes_) account(w);
  for (const Write& w : writes_) {
    if (w.fresh->absent()) worker_.dead.push_back({w.table, w.key});
    store_.retire(worker_, version_of(w.locked), stamp);
  }
  bump(worker_.counters.commits);
  writes_.clear();
  return Status::ok;
}

bool Txn::lock_writes() {
  for (size_t i = 0; i < writes_.size(); ++i) {
    Write& w = writes_[i];
    uint64_t word = w.slot->load(std::memory_order_acquire);
    // Slots are returned and reused: it may be empty, or another key's by now.
    const bool free = word && !(word & kLock) && w.slot->compare_exchange_strong(word, word | kLock);
    if (free) {
      w.locked = word;
      const Version* head = version_of(word);
      const bool first =
          head->stamp() <= snapshot_ || MUTANT(no_first_committer) || MUTANT(only_last_committer);
      if (first && (head->key == w.key || MUTANT(reused_slot_unchecked)))
        continue;
      w.slot->store(word);
    }
    unlock(i);
    return false;
  }
  return true;
}

bool Txn::owns(const Word* slot) const {
  const auto at = std::lower_bound(writes_.begin(), writes_.end(), slot,
                                   [](const Write& w, const Word* s) { return w.slot < s; });
  return at != writes_.end() && at->slot == slot;
}

bool Txn::validate() const {
  if (MUTANT(no_read_validation) || MUTANT(only_last_committer)) return true;
  for (const Read& r : reads_) {
    const uint64_t now = r.word->load();
    if (now != r.value && !(now == (r.value | kLock) && owns(r.word))) return false;
  }
  for (const Read& h : headers_)
    if (!same_header(h.word->load(), h.value)) return false;
  return true;
}

void Txn::unlock(size_t n) {
  for (size_t i = 0; i < n; ++i) writes_[i].slot->store(writes_[i].locked);
}

void Txn::account(const Write& w) const {
  const Version *old = version_of(w.locked), *now = w.fresh;
  Table& table = *w.table;
  const auto relaxed = std::memory_order_relaxed;
  const int rows = !now->absent() - !old->absent();
  const int spilled = now->spilled() - old->spilled();
  const int chunks = __builtin_popcount(now->alive()) - __builtin_popcount(old->alive());
  if (rows) table.rows.fetch_add(static_cast<uint64_t>(int64_t{rows}), relaxed);
  if (spilled) table.spilled_rows.fetch_add(static_cast<uint64_t>(int64_t{spilled}), relaxed);
  if (chunks) table.alive_chunks.fetch_add(static_cast<uint64_t>(int64_t{chunks}), relaxed);
}

void Txn::abandon() {
  for (const Write& w : writes_)
    if (w.fresh) store_.release(worker_, w.fresh);
  writes_.clear();
}

}  // namespace ray_pipe::rows
