// Where versions live: one private mapping, cut into slabs, each slab into cells of one size.
//
// A slab is a huge page (2 MiB) unless the store is told otherwise. It belongs to one size class at
// a time and goes back to the system as a whole, so rows that shrink really free memory.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base.hpp"

namespace ray_pipe::rows {

constexpr int kMaxClasses = 96;
constexpr int kNoClass = 255;

// Gives back to the system what is free in the heap.
void trim_heap();

// A private anonymous mapping, aligned to huge pages; the advice does nothing on shared memory.
class Mapping {
 public:
  Mapping() = default;
  Mapping(size_t bytes, bool huge);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

class Arena {
 public:
  Arena(size_t capacity, size_t slab_bytes, bool huge);

  // The class of cells that hold `bytes`; made at the first call.
  int class_of(size_t bytes);
  size_t cell_bytes(int size_class) const { return cell_bytes_[size_class]; }
  size_t slab_bytes() const { return slab_bytes_; }
  bool huge() const { return huge_; }

  // A slab for this class, or nullptr. The last slabs are kept for updates: a table that inserts
  // have filled can still be trained, as each update gives back what it takes.
  char* take_slab(int size_class, bool from_reserve);
  void give_back(size_t slab);

  // Memory outside the slabs (index, recency queue) counts too. False at the cap.
  bool charge(size_t bytes);
  void charge_always(size_t bytes);
  void discharge(size_t bytes);

  size_t slab_of(const void* cell) const {
    return static_cast<size_t>(static_cast<const char*>(cell) - base_.data()) / slab_bytes_;
  }
  char* slab_start(size_t slab) const { return base_.data() + slab * slab_bytes_; }
  size_t num_slabs() const { return num_slabs_; }
  int class_at(size_t slab) const { return slabs_[slab].size_class; }
  size_t cells_per_slab(int size_class) const { return slab_bytes_ / cell_bytes_[size_class]; }

  // A slab that is being emptied: its cells are not used again, the last one frees it.
  bool vacating(size_t slab) const { return slabs_[slab].vacating.load(std::memory_order_relaxed); }
  void vacate(size_t slab, uint32_t live);
  void cell_left(size_t slab);

  size_t used_bytes() const;
  size_t charged_bytes() const;  // of those, what is outside the slabs
  size_t capacity() const { return capacity_; }
  int num_classes() const { return num_classes_; }
  char* base() const { return base_.data(); }
  size_t reserve_slabs() const { return reserve_; }

 private:
  struct Slab {
    uint8_t size_class = kNoClass;
    std::atomic<bool> vacating{false};
    std::atomic<uint32_t> live{0};
  };
  Mapping base_;
  size_t slab_bytes_, capacity_, num_slabs_, reserve_;
  bool huge_;
  std::unique_ptr<Slab[]> slabs_;
  mutable std::mutex mutex_;
  std::vector<uint32_t> free_;
  size_t next_fresh_ = 0, in_use_ = 0, charged_ = 0;
  int num_classes_ = 0;
  size_t cell_bytes_[kMaxClasses] = {};
};

}  // namespace ray_pipe::rows
