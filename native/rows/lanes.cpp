#include "lanes.hpp"

#include <algorithm>
#include <chrono>
#include <deque>
#include <thread>

namespace ray_pipe::rows {

namespace {
constexpr int kAlone = 4;        // after so many conflicts a transaction runs without neighbours
}  // namespace

void back_off(int attempts) {
  if (attempts < 4) return;
  if (attempts < 32) std::this_thread::yield();
  else std::this_thread::sleep_for(std::chrono::microseconds(20 * std::min(attempts - 31, 50)));
}

void tidy(Store& store, Worker& worker, bool now) {
  if (!now && ++worker.since_reclaim < 64) return;
  worker.since_reclaim = 0;
  const Batch scope(store, worker);
  store.sweep(worker);
  store.reclaim(worker);
}

RunResult run_lanes(Store& store, size_t count, int batch, bool inlined, uint8_t* statuses,
                    const std::function<Body(Txn&, size_t)>& start, uint64_t* stamps) {
  struct Task {
    size_t index;
    int attempts, rooms;
  };
  struct Lane {
    explicit Lane(Store& s, Worker& w) : txn(s, w) {}
    Txn txn;
    Body body;
    Task task{};
    bool open = false;
  };
  const Borrowed borrowed(store);
  Worker& worker = *borrowed;
  batch = std::clamp(batch, 1, kMaxBatch);
  std::deque<Lane> lanes;  // addresses stay
  for (int i = 0; i < batch; ++i) lanes.emplace_back(store, worker);
  std::vector<Task> again;
  size_t next = 0;
  RunResult result;
  uint64_t resumes = 0;

  const auto settle = [&](Lane& lane, Status status) {
    statuses[lane.task.index] = static_cast<uint8_t>(status);
    if (stamps) stamps[lane.task.index] = lane.txn.stamp;
    switch (status) {
      case Status::ok: ++result.ok; break;
      case Status::conflict: ++result.conflict; break;
      case Status::pending: ++result.pending; bump(worker.counters.pending); break;
      case Status::nonfinite: ++result.nonfinite; break;
      default: ++result.full; bump(worker.counters.full); break;
    }
  };
  // A finished body: commit it, or see what it lacked.
  std::vector<Lane*> crowded;
  const auto finish = [&](Lane& lane) {
    lane.open = false;
    Status status = lane.body.status();
    lane.body.clear();
    if (lane.txn.trouble != Status::ok) {
      lane.txn.abandon();
      crowded.push_back(&lane);
      return;
    }
    if (status == Status::ok) {
      try {
        status = lane.txn.commit();
      } catch (const std::bad_alloc&) {
        status = Status::full;
      }
      if (status == Status::conflict) {
        bump(worker.counters.conflicts);
        if (++lane.task.attempts < kAttempts) {
          again.push_back(lane.task);
          return;
        }
      }
    }
    lane.txn.abandon();
    settle(lane, status);
  };

  while (next < count || !again.empty()) {
    int width = batch;
    if (!again.empty() && again.back().attempts > kAlone) {
      width = 1;
      back_off(again.back().attempts);
    }
    {
      const Batch scope(store, worker);
      int filled = 0, open = 0;
      for (; filled < width && (next < count || !again.empty()); ++filled) {
        Lane& lane = lanes[static_cast<size_t>(filled)];
        if (!again.empty()) {
          lane.task = again.back();
          again.pop_back();
          bump(worker.counters.retries);
        } else {
          lane.task = {next++, 0, 0};
        }
        lane.txn.begin(scope.snapshot());
        lane.txn.inlined = inlined;
        lane.body = start(lane.txn, lane.task.index);
        if (lane.body.resume()) finish(lane);
        else lane.open = true, ++open;
      }
      while (open)
        for (int i = 0; i < filled; ++i) {
          Lane& lane = lanes[static_cast<size_t>(i)];
          if (!lane.open || !lane.txn.waiting->step()) continue;
          ++resumes;
          if (lane.body.resume()) {
            finish(lane);
            --open;
            if (MUTANT(lane_deregisters)) worker.entry.store(kIdle);
          }
        }
      bump(worker.counters.batches);
    }
    for (Lane* lane : crowded) {
      if (make_room(store, worker, lane->txn, lane->task.rooms))
        again.push_back({lane->task.index, lane->task.attempts, lane->task.rooms + 1});
      else settle(*lane, Status::full);
    }
    crowded.clear();
    tidy(store, worker);
  }
  bump(worker.counters.resumes, resumes);
  return result;
}

}  // namespace ray_pipe::rows
