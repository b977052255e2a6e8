// Embedding rows and ids on their way to the wire: distinct ids, row-scaled half floats, int8.
//
// The bits are those of the numpy twins in compressors/wire_kernels.py, which has checked every
// shape and dtype and keeps the arrays alive. Without the GIL.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <nanobind/nanobind.h>

#include "bind.hpp"

namespace nb = nanobind;

namespace ray_pipe {
namespace {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

constexpr uint32_t kInfinity = 0x7f800000;

// The largest magnitude of a row, as bits: they order as the numbers do, and what is not finite
// comes last.
uint32_t largest_bits(const float* row, size_t dim) {
  uint32_t largest = 0;
  for (size_t d = 0; d < dim; ++d) largest = std::max(largest, bits_of(row[d]) & 0x7fffffff);
  return largest;
}

// To nearest even. Without a branch, so that the compiler can take several at a time.
uint16_t half_of(float x) {
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffff;
  const uint32_t tiny = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;  // below 2**-14
  const uint32_t usual = ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112u << 10);
  const uint32_t half = magnitude < 0x38800000 ? tiny : usual;
  return static_cast<uint16_t>(half | (bits >> 16 & 0x8000));
}

float float_of_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return float_of(sign | kInfinity | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x400) return float_of(sign | ((magnitude + (112u << 10)) << 13));
  return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24f));
}

constexpr int kTopExponent = -113;        // where the next half float up, 32768, would scale back
constexpr uint16_t kTopHalf = 0x77ff;     // to infinity: 32752 is the largest that is sent

// Exact: a power of two of a double's range.
double power_of_two(int exponent) { return std::ldexp(1.0, std::clamp(exponent, -1000, 1000)); }

size_t rows_to_half(Address rows, size_t num, size_t dim, Address codes, Address exponents) {
  const nb::gil_scoped_release free;
  const float* row = at<const float>(rows);
  uint16_t* code = at<uint16_t>(codes);
  size_t bad = 0;
  for (size_t r = 0; r < num; ++r, row += dim, code += dim) {
    const uint32_t largest = largest_bits(row, dim);
    bad += largest >= kInfinity;
    if (bad) continue;
    int exponent = 0;
    if (largest) {
      const float fraction = std::frexp(float_of(largest), &exponent);
      exponent = 15 - (exponent - (fraction == 0.5f));
    }
    at<int32_t>(exponents)[r] = exponent;
    const double scale = power_of_two(exponent);
    for (size_t d = 0; d < dim; ++d)
      code[d] = half_of(static_cast<float>(static_cast<double>(row[d]) * scale));
    if (exponent == kTopExponent)
      for (size_t d = 0; d < dim; ++d)
        if ((code[d] & 0x7fff) > kTopHalf) code[d] = (code[d] & 0x8000) | kTopHalf;
  }
  return bad;
}

size_t half_to_rows(Address codes, Address exponents, size_t num, size_t dim, Address rows) {
  const nb::gil_scoped_release free;
  const uint16_t* code = at<const uint16_t>(codes);
  float* row = at<float>(rows);
  size_t bad = 0;
  for (size_t r = 0; r < num; ++r, row += dim, code += dim) {
    const double scale = power_of_two(-at<const int32_t>(exponents)[r]);
    for (size_t d = 0; d < dim; ++d)
      row[d] = static_cast<float>(static_cast<double>(float_of_half(code[d])) * scale);
    bad += largest_bits(row, dim) >= kInfinity;
  }
  return bad;
}

size_t rows_to_int8(Address rows, size_t num, size_t dim, float smallest, float largest,
                    Address codes, Address steps) {
  const nb::gil_scoped_release free;
  const float* row = at<const float>(rows);
  int8_t* code = at<int8_t>(codes);
  size_t bad = 0;
  for (size_t r = 0; r < num; ++r, row += dim, code += dim) {
    const uint32_t most = largest_bits(row, dim);
    bad += most >= kInfinity;
    if (bad) continue;
    const float step = std::clamp(float_of(most) / 127.0f, smallest, largest);
    at<float>(steps)[r] = step;
    for (size_t d = 0; d < dim; ++d)
      code[d] = static_cast<int8_t>(std::clamp(std::nearbyint(row[d] / step), -127.0f, 127.0f));
  }
  return bad;
}

size_t int8_to_rows(Address codes, Address steps, size_t num, size_t dim, Address rows) {
  const nb::gil_scoped_release free;
  const int8_t* code = at<const int8_t>(codes);
  float* row = at<float>(rows);
  size_t bad = 0;
  for (size_t r = 0; r < num; ++r, row += dim, code += dim) {
    const float step = at<const float>(steps)[r];
    for (size_t d = 0; d < dim; ++d) row[d] = static_cast<float>(code[d]) * step;
    bad += largest_bits(row, dim) >= kInfinity;
  }
  return bad;
}

// --- ids ------------------------------------------------------------------------------------------

struct Occurrence {
  uint64_t key;  // with the sign bit turned: unsigned order is the order of the ids
  uint64_t place;
};
constexpr uint64_t kSign = uint64_t{1} << 63;

// Stable, by eight bits at a time; a digit that all keys share costs nothing.
void sort_by_key(std::vector<Occurrence>& items) {
  std::vector<Occurrence> other(items.size());
  for (int shift = 0; shift < 64; shift += 8) {
    size_t starts[256] = {};
    for (const Occurrence& item : items) ++starts[item.key >> shift & 0xff];
    if (starts[items[0].key >> shift & 0xff] == items.size()) continue;
    size_t sum = 0;
    for (size_t& start : starts) {
      const size_t count = start;
      start = sum;
      sum += count;
    }
    for (const Occurrence& item : items) other[starts[item.key >> shift & 0xff]++] = item;
    items.swap(other);
  }
}

size_t dedupe(Address ids, size_t num, Address unique, Address inverse, Address counts) {
  const nb::gil_scoped_release free;
  if (num == 0) return 0;
  std::vector<Occurrence> items(num);
  for (size_t i = 0; i < num; ++i)
    items[i] = {static_cast<uint64_t>(at<const int64_t>(ids)[i]) ^ kSign, i};
  sort_by_key(items);
  size_t distinct = 0;
  for (size_t i = 0; i < num; ++i) {
    if (i == 0 || items[i].key != items[i - 1].key) {
      at<int64_t>(unique)[distinct] = static_cast<int64_t>(items[i].key ^ kSign);
      at<int64_t>(counts)[distinct++] = 0;
    }
    ++at<int64_t>(counts)[distinct - 1];
    at<int64_t>(inverse)[items[i].place] = static_cast<int64_t>(distinct - 1);
  }
  return distinct;
}

}  // namespace

void bind_wire(nb::module_& m) {
  m.def("rows_to_half", &rows_to_half);
  m.def("half_to_rows", &half_to_rows);
  m.def("rows_to_int8", &rows_to_int8);
  m.def("int8_to_rows", &int8_to_rows);
  m.def("dedupe", &dedupe);
}

}  // namespace ray_pipe
