// Exact least-recently-used order: a queue of slot numbers.
//
// A touch appends the slot's number and writes the position into the row's newest version; an entry
// counts only while its row still names that position, so nothing is ever unlinked. When more than
// half of the entries are stale the queue is written anew. All methods but `moved` want the lock.
//
// Marks say at which step the entries were written: one for each run of entries of one step. Only
// checkpoints read them, to merge the rows of several shards in the order of their last use.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <mutex>

#include "layout.hpp"

namespace ray_pipe::rows {

class Recency {
 public:
  explicit Recency(Arena& arena) : arena_(arena) {}
  ~Recency() { arena_.discharge(bytes()); }

  std::mutex mutex;
  std::mutex evicting;  // taken before a batch is opened: who is next chooses other rows

  uint64_t begin() const { return begin_; }
  uint64_t end() const { return end_; }
  uint32_t at(uint64_t position) const { return blocks_[index(position)][position % kBlock]; }
  size_t bytes() const { return blocks_.size() * kBlock * sizeof(uint32_t); }

  void push(uint32_t slot_number) {
    if (blocks_.empty() || index(end_) == blocks_.size()) {
      blocks_.push_back(std::make_unique<uint32_t[]>(kBlock));
      arena_.charge_always(kBlock * sizeof(uint32_t));
    }
    blocks_[index(end_)][end_ % kBlock] = slot_number;
    ++end_;
  }
  void pop() {
    ++begin_;
    if (begin_ % kBlock == 0 && !blocks_.empty()) {
      blocks_.pop_front();
      arena_.discharge(kBlock * sizeof(uint32_t));
    }
    while (marks_.size() > 1 && marks_[1].from <= begin_) marks_.pop_front();
  }

  // Entries from here on are of this step.
  void mark(uint64_t step) {
    newest_ = std::max(newest_, step);
    if (!marks_.empty() && marks_.back().step == step) return;
    if (!marks_.empty() && marks_.back().from == end_) marks_.pop_back();
    marks_.push_back({end_, step});
  }
  uint64_t newest_step() const { return newest_; }
  uint64_t step_at(uint64_t position) const {
    const auto after = std::upper_bound(marks_.begin(), marks_.end(), position,
                                        [](uint64_t p, const Mark& m) { return p < m.from; });
    return after == marks_.begin() ? 0 : std::prev(after)->step;
  }
  // Growth moved a row. Stale entries may then name another row's slot, whose position is not
  // theirs: still stale.
  void moved(uint32_t position, uint32_t slot_number) {
    if (position == kNoRecency || begin_ == end_) return;
    const uint64_t full = begin_ + static_cast<uint32_t>(position - static_cast<uint32_t>(begin_));
    if (full < end_) blocks_[index(full)][full % kBlock] = slot_number;
  }

 private:
  static constexpr uint64_t kBlock = 1 << 14;
  size_t index(uint64_t position) const {
    return static_cast<size_t>(position / kBlock - begin_ / kBlock);
  }
  Arena& arena_;
  struct Mark {
    uint64_t from, step;
  };
  std::deque<std::unique_ptr<uint32_t[]>> blocks_;
  std::deque<Mark> marks_;
  uint64_t begin_ = 0, end_ = 0, newest_ = 0;
};

}  // namespace ray_pipe::rows
