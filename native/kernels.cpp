// The loops behind compressors/kernels.py; compiled once for each instruction set.
//
// One pass over memory: load a group of 32, find its extreme, round the scale to bf16, divide,
// round, pack, decode again, add, round the row, store. The arithmetic and its order are those of
// compressors/kernels_torch.py. -ffp-contract=off keeps a*b+c two roundings; nothing here may be
// reordered by the compiler, so no -ffast-math.
#include "kernels.hpp"

#include <cstring>
#include <limits>
#include <memory>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#ifndef RAY_PIPE_ISA
#error "RAY_PIPE_ISA names the instruction set of this compilation: baseline, avx2 or avx512"
#endif
#define RP_JOIN(a, b) a##b
#define RP_EXPAND(a, b) RP_JOIN(a, b)
#define RP_QUOTE(a) #a
#define RP_STRING(a) RP_QUOTE(a)
#define RP_NAMESPACE RP_EXPAND(isa_, RAY_PIPE_ISA)

namespace ray_pipe {
namespace RP_NAMESPACE {
namespace {

#include "simd.hpp"

constexpr uint32_t kAbs = 0x7fffffff, kInfinity = 0x7f800000;
constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2**23: adding it rounds to an integer, RNE
constexpr int32_t kRoundBits = 0x4b400000;

// Sums of fp32 squares outside these may have overflowed or vanished: take them again in fp64.
constexpr float kSquaresLow = 1e-30f, kSquaresHigh = 1e30f;

struct Grid {
  explicit Grid(const Layout& layout)
      : symmetric(layout.symmetric), full(1 << (layout.bits - 1)),
        levels(static_cast<float>(symmetric ? full - 1 : full)), lowest(symmetric ? 1 : 0) {}

  // |extreme| as fp32 bits and its sign -> the bf16 scale.
  RP_INLINE uint16_t scale(uint32_t extreme, uint32_t negative) const {
    uint32_t bits = (extreme + 0x7fff + ((extreme >> 16) & 1)) >> 16;
    bits = bits < 0x7f80 ? bits : 0x7f7f;
    const uint32_t sign = symmetric || bits == 0 ? 0 : (negative ^ 1) << 15;
    return static_cast<uint16_t>(bits | sign);
  }
  // What encoding divides by: where the scale is 0 every code is 0, and x/inf is 0.
  RP_INLINE float divisor(uint16_t scale) const {
    return scale == 0 ? as_float(kInfinity) : as_float(static_cast<uint32_t>(scale) << 16);
  }

  bool symmetric;
  int32_t full;    // 2**(bits-1): code + full travels
  float levels;    // F, or L = F-1
  int32_t lowest;  // the smallest code + full
};

RP_INLINE bool is_finite(uint16_t scale) { return (scale & 0x7f80) != 0x7f80; }

// --- blocks of 32 -------------------------------------------------------------------------------

struct Block {
  Floats v[kParts];
};

RP_INLINE Block read(const float* from) {
  Block b;
  for (int p = 0; p < kParts; ++p) b.v[p] = load<Floats>(from + p * kWidth);
  return b;
}
RP_INLINE Block read(const uint16_t* from) {
  Block b;
  for (int p = 0; p < kParts; ++p) b.v[p] = widen(from + p * kWidth);
  return b;
}
RP_INLINE void write(float* to, const Block& b) {
  for (int p = 0; p < kParts; ++p) store(to + p * kWidth, b.v[p]);
}
RP_INLINE void write(uint16_t* to, const Block& b) {
  Ints halves[kParts];
  for (int p = 0; p < kParts; ++p) halves[p] = round_bf16(b.v[p]);
  store_halves(to, halves);
}

struct Quantized {
  Ints codes[kParts];  // code + full
  uint16_t scale;
  uint32_t extreme;  // |extreme| as bits
};

RP_INLINE Quantized quantize_block(const Grid& grid, const Block& x) {
  Quantized q;
  Ints magnitude[kParts];
  for (int p = 0; p < kParts; ++p) magnitude[p] = (Ints)x.v[p] & kAbs;
  Ints top = magnitude[0];
  for (int p = 1; p < kParts; ++p) top = max(top, magnitude[p]);
  q.extreme = largest(top);
  uint32_t equal = 0, negative = 0;
  for (int p = 0; p < kParts; ++p) {
    equal |= signs(magnitude[p] == static_cast<int32_t>(q.extreme)) << (p * kWidth);
    negative |= signs((Ints)x.v[p]) << (p * kWidth);
  }
  q.scale = grid.scale(q.extreme, (negative >> __builtin_ctz(equal)) & 1);  // the first extreme
  const float divisor = grid.divisor(q.scale);
  for (int p = 0; p < kParts; ++p) {
    const Floats z = x.v[p] / divisor * grid.levels;
    const Ints code = (Ints)(z + kRoundMagic) - (kRoundBits - grid.full);
    q.codes[p] = min(max(code, Ints{} + grid.lowest), Ints{} + (2 * grid.full - 1));
  }
  return q;
}

RP_INLINE Floats dequantize_part(const Grid& grid, Ints codes, float scale) {
  const Floats code = __builtin_convertvector(codes - grid.full, Floats);
  return (grid.symmetric ? code / grid.levels : code * (1.0f / grid.levels)) * scale;
}

RP_INLINE float widen_scale(uint16_t scale) { return as_float(uint32_t{scale} << 16); }

// The bits after the last code of a stream are zero.
RP_INLINE Words first_bytes(Words w, int count) {
  uint8_t bytes[kBlock];
  store(bytes, w);
  for (int i = count; i < kBlock; ++i) bytes[i] = 0;
  return load<Words>(bytes);
}

struct Squares {
  Floats delta{}, value{}, error{};
};

// --- fused rows, groups of 32 -------------------------------------------------------------------

struct NoRow {};  // plain quantise: nothing remembered

template <class Row>
constexpr bool kHasRow = !__is_same(Row, NoRow);

// Encode one block. For a short last block the caller hands padded copies and `count` < 32.
template <int BITS, class Row>
RP_INLINE uint32_t encode_block(const Grid& grid, const float* h, const Row* row, int count,
                                uint8_t* codes, uint16_t* scale, Row* new_row, Squares& squares) {
  const Block value = read(h);
  Block delta = value, old;
  if constexpr (kHasRow<Row>) {
    old = read(row);
    for (int p = 0; p < kParts; ++p) delta.v[p] = value.v[p] - old.v[p];
  }
  const Quantized q = quantize_block(grid, delta);
  *scale = q.scale;
  Words bytes = join_bytes(q.codes);
  if (count < kBlock) bytes = first_bytes(bytes, count);
  pack<BITS>(bytes, codes);
  if constexpr (kHasRow<Row>) {
    const float s = widen_scale(q.scale);
    Block next;
    for (int p = 0; p < kParts; ++p) {
      next.v[p] = old.v[p] + dequantize_part(grid, q.codes[p], s);
      const Floats error = value.v[p] - next.v[p];
      squares.delta += delta.v[p] * delta.v[p];
      squares.value += value.v[p] * value.v[p];
      squares.error += error * error;
    }
    write(new_row, next);
  }
  return q.extreme;
}

template <int BITS, class Row>
RP_INLINE void decode_block(const Grid& grid, const uint8_t* codes, uint16_t scale, const Row* row,
                            float* out, Row* new_row) {
  Ints code[kParts];
  unpack<BITS>(codes, code);
  const float s = widen_scale(scale);
  Block next;
  for (int p = 0; p < kParts; ++p) next.v[p] = dequantize_part(grid, code[p], s);
  if constexpr (kHasRow<Row>) {
    const Block old = read(row);
    for (int p = 0; p < kParts; ++p) next.v[p] = old.v[p] + next.v[p];
    write(new_row, next);
  }
  write(out, next);
}

// --- any group size: one value at a time; also the exact sums of the fused loops -----------------

RP_INLINE float widen_one(float v) { return v; }
RP_INLINE float widen_one(uint16_t v) { return widen_scale(v); }
RP_INLINE void narrow_one(float v, float* to) { *to = v; }
RP_INLINE void narrow_one(float v, uint16_t* to) {
  const uint32_t bits = as_bits(v);
  *to = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
template <class Row>
RP_INLINE bool row_is_finite(const Row& v) {
  return (as_bits(widen_one(v)) & kAbs) < kInfinity;
}

RP_INLINE void put_code(uint8_t* codes, size_t index, int bits, uint32_t code) {
  const size_t at = index * static_cast<size_t>(bits);
  const uint32_t shifted = code << (at & 7);
  codes[at >> 3] = static_cast<uint8_t>(codes[at >> 3] | shifted);
  if ((at & 7) + static_cast<size_t>(bits) > 8)
    codes[(at >> 3) + 1] = static_cast<uint8_t>(codes[(at >> 3) + 1] | shifted >> 8);
}
RP_INLINE int32_t get_code(const uint8_t* codes, size_t index, int bits) {
  const size_t at = index * static_cast<size_t>(bits);
  uint32_t word = codes[at >> 3];
  if ((at & 7) + static_cast<size_t>(bits) > 8) word |= uint32_t{codes[(at >> 3) + 1]} << 8;
  return static_cast<int32_t>((word >> (at & 7)) & ((1u << bits) - 1));
}
RP_INLINE float dequantize_one(const Grid& grid, int32_t code, uint16_t scale) {
  return static_cast<float>(code - grid.full) / grid.levels * widen_scale(scale);
}

template <class Row>
uint32_t encode_row(const Layout& layout, const Grid& grid, const float* h, const Row* row,
                    uint8_t* codes, uint16_t* scales, Row* new_row) {
  std::memset(codes, 0, layout.code_bytes());
  uint32_t worst = 0;
  for (size_t first = 0; first < layout.channels; first += layout.group) {
    const size_t left = layout.channels - first;
    const size_t end = first + (left < layout.group ? left : layout.group);
    const auto delta = [&](size_t i) {
      if constexpr (kHasRow<Row>) return h[i] - widen_one(row[i]);
      return h[i];
    };
    uint32_t extreme = 0, negative = 0;
    for (size_t i = first; i < end; ++i) {
      const uint32_t bits = as_bits(delta(i));
      if ((bits & kAbs) > extreme) extreme = bits & kAbs, negative = bits >> 31;
    }
    worst = worst > extreme ? worst : extreme;
    const uint16_t scale = *scales++ = grid.scale(extreme, negative);
    const float divisor = grid.divisor(scale);
    for (size_t i = first; i < end; ++i) {
      const float z = delta(i) / divisor * grid.levels;
      int32_t code = static_cast<int32_t>(as_bits(z + kRoundMagic)) - (kRoundBits - grid.full);
      code = code > grid.lowest ? code : grid.lowest;
      code = code < 2 * grid.full - 1 ? code : 2 * grid.full - 1;
      put_code(codes, i, layout.bits, static_cast<uint32_t>(code));
      if constexpr (kHasRow<Row>)
        narrow_one(widen_one(row[i]) + dequantize_one(grid, code, scale), new_row + i);
    }
  }
  return worst;
}

template <class Row>
void decode_row(const Layout& layout, const Grid& grid, const uint8_t* codes,
                const uint16_t* scales, const Row* row, float* out, Row* new_row) {
  for (size_t first = 0; first < layout.channels; first += layout.group, ++scales) {
    const size_t left = layout.channels - first;
    const size_t end = first + (left < layout.group ? left : layout.group);
    for (size_t i = first; i < end; ++i) {
      const float value = dequantize_one(grid, get_code(codes, i, layout.bits), *scales);
      if constexpr (kHasRow<Row>) {
        out[i] = widen_one(row[i]) + value;
        narrow_one(out[i], new_row + i);
      } else {
        out[i] = value;
      }
    }
  }
}

// The sums of one row in fp64, from what was stored. False if the new row is not finite.
template <class Row>
bool exact_sums(const Layout& layout, const Grid& grid, const float* h, const Row* row,
                const uint8_t* codes, const uint16_t* scales, const Row* new_row, Sums* sums) {
  bool finite = true;
  for (size_t i = 0; i < layout.channels; ++i) {
    const float old = widen_one(row[i]), delta = h[i] - old;
    const float code = dequantize_one(grid, get_code(codes, i, layout.bits), scales[i / layout.group]);
    const double error = static_cast<double>(h[i]) - (old + code);
    sums->delta += static_cast<double>(delta) * delta;
    sums->value += static_cast<double>(h[i]) * h[i];
    sums->error += error * error;
    finite = finite && row_is_finite(new_row[i]);
  }
  return finite;
}

// --- whole matrices -----------------------------------------------------------------------------

template <int BITS, class Row>
uint32_t encode_row_32(const Grid& grid, size_t channels, const float* h, const Row* row,
                       uint8_t* codes, uint16_t* scales, Row* new_row, Squares& squares) {
  uint32_t worst = 0;
  size_t c = 0;
  for (; c + kBlock <= channels; c += kBlock, codes += 4 * BITS) {
    const uint32_t extreme = encode_block<BITS, Row>(
        grid, h + c, kHasRow<Row> ? row + c : nullptr, kBlock, codes, scales++,
        kHasRow<Row> ? new_row + c : nullptr, squares);
    worst = worst > extreme ? worst : extreme;
  }
  if (c < channels) {
    const size_t count = channels - c;
    float padded[kBlock] = {};
    Row old[kBlock] = {}, next[kBlock];
    uint8_t packed[4 * BITS];
    std::memcpy(padded, h + c, count * sizeof(float));
    if constexpr (kHasRow<Row>) std::memcpy(old, row + c, count * sizeof(Row));
    const uint32_t extreme = encode_block<BITS, Row>(grid, padded, old, static_cast<int>(count),
                                                     packed, scales, next, squares);
    worst = worst > extreme ? worst : extreme;
    std::memcpy(codes, packed, (count * BITS + 7) / 8);
    if constexpr (kHasRow<Row>) std::memcpy(new_row + c, next, count * sizeof(Row));
  }
  return worst;
}

template <int BITS, class Row>
void decode_row_32(const Grid& grid, size_t channels, const uint8_t* codes, const uint16_t* scales,
                   const Row* row, float* out, Row* new_row) {
  size_t c = 0;
  for (; c + kBlock <= channels; c += kBlock, codes += 4 * BITS)
    decode_block<BITS, Row>(grid, codes, *scales++, kHasRow<Row> ? row + c : nullptr, out + c,
                            kHasRow<Row> ? new_row + c : nullptr);
  if (c < channels) {
    const size_t count = channels - c;
    uint8_t packed[4 * BITS] = {};
    Row old[kBlock] = {}, next[kBlock];
    float values[kBlock];
    std::memcpy(packed, codes, (count * BITS + 7) / 8);
    if constexpr (kHasRow<Row>) std::memcpy(old, row + c, count * sizeof(Row));
    decode_block<BITS, Row>(grid, packed, *scales, old, values, next);
    std::memcpy(out + c, values, count * sizeof(float));
    if constexpr (kHasRow<Row>) std::memcpy(new_row + c, next, count * sizeof(Row));
  }
}

template <int BITS, class Row>
size_t encode(const Layout& layout, const float* h, const Row* row, uint8_t* codes,
              uint16_t* scales, Row* new_row, Sums* sums) {
  const Grid grid(layout);
  const size_t channels = layout.channels;
  size_t bad = 0;
  for (size_t r = 0; r < layout.rows; ++r) {
    Squares squares;
    uint32_t worst;
    bool exact = false;
    if (layout.group == kBlock) {
      worst = encode_row_32<BITS, Row>(grid, channels, h, row, codes, scales, new_row, squares);
    } else {
      worst = encode_row<Row>(layout, grid, h, row, codes, scales, new_row);
      exact = true;
    }
    bool good = worst < kInfinity;
    if constexpr (kHasRow<Row>) {
      const float value = sum(squares.value), delta = sum(squares.delta);
      exact = exact || !(value > kSquaresLow && value < kSquaresHigh && delta < kSquaresHigh);
      if (!exact) {
        sums->delta += delta;
        sums->value += value;
        sums->error += sum(squares.error);
      } else if (good) {
        good = exact_sums<Row>(layout, grid, h, row, codes, scales, new_row, sums);
      }
      row += channels;
      new_row += channels;
    }
    bad += !good;
    h += channels;
    codes += layout.code_bytes();
    scales += layout.num_groups();
  }
  return bad;
}

template <int BITS, class Row>
size_t decode(const Layout& layout, const uint8_t* codes, const uint16_t* scales, const Row* row,
              float* out, Row* new_row) {
  const Grid grid(layout);
  size_t bad = 0;
  for (size_t r = 0; r < layout.rows; ++r) {
    bool good = true;
    for (size_t g = 0; g < layout.num_groups(); ++g) good = good && is_finite(scales[g]);
    bad += !good;
    if (layout.group == kBlock)
      decode_row_32<BITS, Row>(grid, layout.channels, codes, scales, row, out, new_row);
    else
      decode_row<Row>(layout, grid, codes, scales, row, out, new_row);
    if constexpr (kHasRow<Row>) {
      row += layout.channels;
      new_row += layout.channels;
    }
    out += layout.channels;
    codes += layout.code_bytes();
    scales += layout.num_groups();
  }
  return bad;
}

// `call` is made with the number of bits as a compile-time constant.
template <class Call>
size_t with_bits(int bits, Call call) {
  switch (bits) {
    case 1: return call.template operator()<1>();
    case 2: return call.template operator()<2>();
    case 3: return call.template operator()<3>();
    case 4: return call.template operator()<4>();
    case 5: return call.template operator()<5>();
    case 6: return call.template operator()<6>();
    case 7: return call.template operator()<7>();
    default: return call.template operator()<8>();
  }
}

size_t quantize(const Layout& layout, const float* x, uint8_t* codes, uint16_t* scales) {
  return with_bits(layout.bits, [&]<int BITS>() {
    return encode<BITS, NoRow>(layout, x, nullptr, codes, scales, nullptr, nullptr);
  });
}

size_t dequantize(const Layout& layout, const uint8_t* codes, const uint16_t* scales, float* out) {
  return with_bits(layout.bits, [&]<int BITS>() {
    return decode<BITS, NoRow>(layout, codes, scales, nullptr, out, nullptr);
  });
}

size_t delta_encode(const Layout& layout, const float* h, const void* row, bool row_is_bf16,
                    uint8_t* codes, uint16_t* scales, void* new_row, Sums* sums) {
  return with_bits(layout.bits, [&]<int BITS>() {
    if (row_is_bf16)
      return encode<BITS>(layout, h, static_cast<const uint16_t*>(row), codes, scales,
                          static_cast<uint16_t*>(new_row), sums);
    return encode<BITS>(layout, h, static_cast<const float*>(row), codes, scales,
                        static_cast<float*>(new_row), sums);
  });
}

size_t delta_decode(const Layout& layout, const uint8_t* codes, const uint16_t* scales,
                    const void* row, bool row_is_bf16, float* out, void* new_row) {
  return with_bits(layout.bits, [&]<int BITS>() {
    if (row_is_bf16)
      return decode<BITS>(layout, codes, scales, static_cast<const uint16_t*>(row), out,
                          static_cast<uint16_t*>(new_row));
    return decode<BITS>(layout, codes, scales, static_cast<const float*>(row), out,
                        static_cast<float*>(new_row));
  });
}

}  // namespace

const Kernels& kernels() {
  static constexpr Kernels table = {RP_STRING(RAY_PIPE_ISA), quantize, dequantize, delta_encode,
                                    delta_decode};
  return table;
}

}  // namespace RP_NAMESPACE
}  // namespace ray_pipe
