// Transactions as coroutines, interleaved by a round-robin scheduler.
//
// A transaction body is written once, `co_await txn.get(...)` and plain code. The read's state
// machine lives in the body's own frame; there is no frame per operation. With the gate on (a table
// that fits the cache, or `sequential`) each read runs at once and nothing suspends.
#pragma once

#include <coroutine>
#include <exception>
#include <functional>
#include <utility>

#include "txn.hpp"

namespace ray_pipe::rows {

// Makes a read awaitable.
struct Read {
  Txn& txn;
  Get get;
  Read(Txn& t, Table& table, int64_t key) : txn(t), get(t, table, key) {}
  bool await_ready() {
    if (!txn.inlined) return false;
    while (!get.step()) {
    }
    return true;
  }
  void await_suspend(std::coroutine_handle<>) noexcept { txn.waiting = &get; }
  Get await_resume() noexcept { return get; }
};

class Body {
 public:
  struct promise_type {
    Status status = Status::ok;
    Body get_return_object() {
      return Body(std::coroutine_handle<promise_type>::from_promise(*this));
    }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_value(Status s) noexcept { status = s; }
    // bad_alloc ends this transaction, not its neighbours.
    void unhandled_exception() noexcept { status = Status::full; }

    // Frames come from the worker. The pool is found through the first argument of the body.
    template <class... Rest>
    static void* operator new(size_t bytes, Txn& txn, Rest&&...) {
      FramePool& pool = txn.worker().frames;
      auto* block = static_cast<FramePool**>(pool.take(bytes + kPrefix));
      *block = &pool;
      return reinterpret_cast<char*>(block) + kPrefix;
    }
    static void operator delete(void* frame, size_t bytes) {
      char* block = static_cast<char*>(frame) - kPrefix;
      (*reinterpret_cast<FramePool**>(block))->give(block, bytes + kPrefix);
    }
    static constexpr size_t kPrefix = 16;
  };

  Body() = default;
  explicit Body(std::coroutine_handle<promise_type> h) : handle_(h) {}
  Body(Body&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Body& operator=(Body&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Body() {
    if (handle_) handle_.destroy();
  }
  // Runs to the next read, or to the end. True at the end.
  bool resume() {
    handle_.resume();
    return handle_.done();
  }
  Status status() const { return handle_.promise().status; }
  void clear() { *this = Body(); }

 private:
  std::coroutine_handle<promise_type> handle_;
};

struct RunResult {
  uint64_t ok = 0, conflict = 0, full = 0, pending = 0, nonfinite = 0;
};

// Runs `count` transactions, `batch` at a time on one snapshot. `start` makes the body of one of
// them; `statuses` gets what became of each, `stamps` of which commit (or snapshot) it is. A conflict is tried again on a new snapshot, a full
// segment grows, both between batches.
constexpr int kMaxBatch = 64;
RunResult run_lanes(Store& store, size_t count, int batch, bool inlined, uint8_t* statuses,
                    const std::function<Body(Txn&, size_t)>& start, uint64_t* stamps = nullptr);

// Makes room after a transaction met `needs_index` or `needs_memory`, for the `tries`th time. False:
// it is full.
constexpr int kRoomTries = 64;
bool make_room(Store& store, Worker& worker, const Txn& txn, int tries);

// Before an attempt: who holds what we need may be off the core.
constexpr int kAttempts = 1000;  // about a second; then the answer is `conflict`
void back_off(int attempts);

// Every 64 batches, and when asked.
void tidy(Store& store, Worker& worker, bool now = false);

}  // namespace ray_pipe::rows
