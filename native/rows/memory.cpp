#include "memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace ray_pipe::rows {

namespace {
constexpr size_t kHugePage = size_t{2} << 20;
size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
}  // namespace

Mapping::Mapping(size_t bytes, bool huge) {
  const size_t align = bytes >= kHugePage ? kHugePage : 4096;
  size_ = round_up(bytes, align == kHugePage ? kHugePage : 4096);
  const size_t asked = size_ + (align == kHugePage ? kHugePage : 0);
  void* got = mmap(nullptr, asked, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) throw std::bad_alloc();
  char* start = static_cast<char*>(got);
  data_ = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(start), align));
  if (data_ > start) munmap(start, static_cast<size_t>(data_ - start));
  char* const end = start + asked;
  if (data_ + size_ < end) munmap(data_ + size_, static_cast<size_t>(end - (data_ + size_)));
  madvise(data_, size_, huge && align == kHugePage ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

// What a prune needed for a moment libc would keep for ever, tens of megabytes of it.
void trim_heap() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

Mapping::~Mapping() {
  if (data_) munmap(data_, size_);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Arena::Arena(size_t capacity, size_t slab_bytes, bool huge)
    : slab_bytes_(slab_bytes), capacity_(capacity), huge_(huge) {
  num_slabs_ = capacity / slab_bytes;
  if (num_slabs_ < 4)
    throw std::invalid_argument("a capacity of " + std::to_string(capacity) + " bytes holds " +
                                std::to_string(num_slabs_) + " slabs of " +
                                std::to_string(slab_bytes) +
                                " bytes, at least 4 are needed; raise `capacity` or lower `slab`");
  reserve_ = std::max<size_t>(1, num_slabs_ / 32);
  base_ = Mapping(num_slabs_ * slab_bytes, huge);
  slabs_ = std::make_unique<Slab[]>(num_slabs_);
  free_.reserve(num_slabs_);
}

int Arena::class_of(size_t bytes) {
  const std::lock_guard lock(mutex_);
  const size_t cell = round_up(bytes, 16);
  for (int i = 0; i < num_classes_; ++i)
    if (cell_bytes_[i] == cell) return i;
  if (num_classes_ == kMaxClasses)
    throw std::invalid_argument("the store has " + std::to_string(kMaxClasses) +
                                " sizes of rows already; use fewer dims and chunk counts");
  if (cell > slab_bytes_)
    throw std::invalid_argument("a row of " + std::to_string(cell) +
                                " bytes does not fit into a slab of " +
                                std::to_string(slab_bytes_) + "; raise `slab`");
  cell_bytes_[num_classes_] = cell;
  return num_classes_++;
}

char* Arena::take_slab(int size_class, bool from_reserve) {
  const std::lock_guard lock(mutex_);
  const size_t kept = from_reserve ? 0 : reserve_;
  if ((in_use_ + 1 + kept) * slab_bytes_ + charged_ > capacity_) return nullptr;
  size_t slab;
  if (!free_.empty()) {
    slab = free_.back();
    free_.pop_back();
  } else if (next_fresh_ < num_slabs_) {
    slab = next_fresh_++;
  } else {
    return nullptr;
  }
  ++in_use_;
  slabs_[slab].size_class = static_cast<uint8_t>(size_class);
  return slab_start(slab);
}

void Arena::give_back(size_t slab) {
  const std::lock_guard lock(mutex_);
  madvise(slab_start(slab), slab_bytes_, MADV_DONTNEED);
  slabs_[slab].size_class = kNoClass;
  slabs_[slab].vacating.store(false, std::memory_order_relaxed);
  free_.push_back(static_cast<uint32_t>(slab));
  --in_use_;
}

bool Arena::charge(size_t bytes) {
  const std::lock_guard lock(mutex_);
  if ((in_use_ + 1) * slab_bytes_ + charged_ + bytes > capacity_) return false;
  charged_ += bytes;
  return true;
}

void Arena::charge_always(size_t bytes) {
  const std::lock_guard lock(mutex_);
  charged_ += bytes;
}

void Arena::discharge(size_t bytes) {
  const std::lock_guard lock(mutex_);
  charged_ -= bytes;
}

void Arena::vacate(size_t slab, uint32_t live) {
  slabs_[slab].live.store(live, std::memory_order_relaxed);
  slabs_[slab].vacating.store(true, std::memory_order_relaxed);
  if (live == 0) give_back(slab);
}

void Arena::cell_left(size_t slab) {
  if (slabs_[slab].live.fetch_sub(1, std::memory_order_acq_rel) == 1) give_back(slab);
}

size_t Arena::charged_bytes() const {
  const std::lock_guard lock(mutex_);
  return charged_;
}

size_t Arena::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return in_use_ * slab_bytes_ + charged_;
}

}  // namespace ray_pipe::rows
