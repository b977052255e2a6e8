// The loops behind compressors/kernels.py; compiled once for each instruction set.
//
// One pass over memory: load a group of 32, find its extreme, round the scale to bf16, divide,
// round, pack, decode again, add, round the row, store. The arithmetic and its order are those of
// compressors/kernels_torch.py. -ffp-contract=off keeps a*b+c two roundings; nothing here may be
// reordered by the compiler, so no -ffast-math.
#include "kernels.hpp"

#include <cstring>
#include <limits>
#include <type_traits>

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

// Scales for which x/s needs no true division: the quotient's rest cannot underflow where it
// matters. A value below 2**-102 is then below 2**-42 of the scale, and its code is 0 anyway.
constexpr uint32_t kUsualLow = (127 - 60) << 7, kUsualHigh = (127 + 100) << 7;

RP_INLINE float widen_scale(uint16_t scale) { return as_float(uint32_t{scale} << 16); }
RP_INLINE bool is_usual(uint16_t scale) {
  const uint32_t magnitude = scale & 0x7fff;
  return magnitude == 0 || (magnitude >= kUsualLow && magnitude < kUsualHigh);
}

struct Grid {
  explicit Grid(const Layout& layout)
      : symmetric(layout.symmetric), full(1 << (layout.bits - 1)), lowest(symmetric ? 1 : 0),
        levels(static_cast<float>(symmetric ? full - 1 : full)), per_level(1.0f / levels) {
    for (int i = 0; i < kWidth; ++i)
      values[i] = static_cast<float>(i % (2 * full) - full) / levels;
  }

  // |extreme| as fp32 bits and its sign -> the bf16 scale.
  RP_INLINE uint16_t scale(uint32_t extreme, bool negative) const {
    uint32_t bits = (extreme + 0x7fff + ((extreme >> 16) & 1)) >> 16;
    bits = bits < 0x7f80 ? bits : 0x7f7f;
    const uint32_t sign = symmetric | negative | (bits == 0) ? 0 : 0x8000;
    return static_cast<uint16_t>(bits | sign);
  }

  bool symmetric;
  int32_t full;    // 2**(bits-1): code + full travels
  int32_t lowest;  // the smallest code + full
  float levels;    // F, or L = F-1
  float per_level;
  Floats values;  // code/levels for the first code+full; used if kTable holds all of them
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
  widen(from, b.v);
  return b;
}
template <bool STREAMED = false>
RP_INLINE void write(float* to, const Block& b) {
  for (int p = 0; p < kParts; ++p) put<STREAMED>(to + p * kWidth, b.v[p]);
}
template <bool STREAMED = false>
RP_INLINE void write(uint16_t* to, const Block& b) {
  store_bf16<STREAMED>(to, b.v);
}

// Each group's largest and smallest value as magnitudes (0 if there is none of that sign).
RP_INLINE void find_extremes(const Block& x, int32_t* positive, int32_t* negative) {
  constexpr int32_t sign = INT32_MIN;
  Ints above = (Ints)x.v[0], below = (Ints)x.v[0] ^ sign;  // the other sign's bits are negative
  for (int p = 1; p < kParts; ++p) {
    above = max(above, (Ints)x.v[p]);
    below = max(below, (Ints)x.v[p] ^ sign);
  }
  largest(max(above, Ints{}), max(below, Ints{}), positive, negative);
}

// Whether -magnitude comes before +magnitude.
inline bool negative_first(const Block& x, uint32_t magnitude) {
  uint32_t bits[kBlock];
  std::memcpy(bits, &x, sizeof bits);
  int i = 0;
  while ((bits[i] & kAbs) != magnitude) ++i;
  return bits[i] >> 31;
}

struct Codes {
  Ints v[kParts];  // code + full
};

template <bool USUAL>
RP_INLINE Codes quantize_block(const Grid& grid, const Block& x, float scale, float reciprocal) {
  Codes codes;
  for (int p = 0; p < kParts; ++p) {
    const Floats ratio = USUAL ? quotient(x.v[p], scale, reciprocal)
                               : x.v[p] / (scale == 0 ? as_float(kInfinity) : scale);
    const Floats z = grid.symmetric ? ratio * grid.levels + kRoundMagic
                                    : exact_product_plus(ratio, grid.levels, kRoundMagic);
    const Ints code = min((Ints)z - (kRoundBits - grid.full), Ints{} + (2 * grid.full - 1));
    // A usual scale is within 2^-8 of the extreme, so that no code is too low: 128.5 rounds to 128.
    codes.v[p] = USUAL ? code : max(code, Ints{} + grid.lowest);
  }
  return codes;
}

template <int BITS>
RP_INLINE Floats dequantize_part(const Grid& grid, Ints codes, float scale) {
  if constexpr ((1 << BITS) <= kTable) return lookup(grid.values, codes) * scale;
  const Floats code = __builtin_convertvector(codes, Floats);
  // The signed grid's full is its levels: code/full - 1 is exact, and so is its product.
  if (!grid.symmetric) return exact_product_plus(code, grid.per_level, -1.0f) * scale;
  return quotient(code - static_cast<float>(grid.full), grid.levels, grid.per_level) * scale;
}

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

template <class Row>
RP_INLINE Block subtract(const Block& value, const Row* row) {
  if constexpr (!kHasRow<Row>) return value;
  else {
    Block delta;
    const Block old = read(row);
    for (int p = 0; p < kParts; ++p) delta.v[p] = value.v[p] - old.v[p];
    return delta;
  }
}

// What blocks are coded with.
constexpr int kBatch = 8;
struct BatchScales {
  alignas(32) float scale[kBatch];
  alignas(32) float reciprocal[kBatch];
};

// Encode one block, whose last 32 - count values are padding.
template <int BITS, bool USUAL, class Row>
RP_INLINE void encode_block(const Grid& grid, const float* h, const Row* row, float scale,
                            float reciprocal, int count, uint8_t* codes, Row* new_row, Squares& squares) {
  const Block value = read(h), delta = subtract(value, row);
  const Codes q = quantize_block<USUAL>(grid, delta, scale, reciprocal);
  Words bytes = join_bytes(q.v);
  if (count < kBlock) bytes = first_bytes(bytes, count);
  pack<BITS>(bytes, codes);
  if constexpr (kHasRow<Row>) {
    Block next = read(row);
    for (int p = 0; p < kParts; ++p) {
      next.v[p] = next.v[p] + dequantize_part<BITS>(grid, q.v[p], scale);
      squares.delta = add_square(squares.delta, delta.v[p]);
      squares.value = add_square(squares.value, value.v[p]);
      squares.error = add_square(squares.error, value.v[p] - next.v[p]);
    }
    write(new_row, next);
  }
}

// A pointer to where block `b` starts; there is none without a row.
template <class T>
RP_INLINE T* block_at(T* base, int b) {
  if constexpr (__is_same(std::remove_const_t<T>, NoRow)) return base;
  else return base + b * kBlock;
}

// Encode up to kBatch blocks; returns the largest magnitude as bits. The way to a scale is one
// chain of dependent steps: a first pass takes it for all blocks side by side.
template <int BITS, class Row>
RP_INLINE uint32_t encode_blocks(const Grid& grid, int blocks, const float* h, const Row* row,
                                 int count, uint8_t* codes, uint16_t* scales, Row* new_row,
                                 Squares& squares) {
  alignas(32) int32_t positive[kBatch] = {}, negative[kBatch] = {};
  for (int b = 0; b < blocks; ++b)
    find_extremes(subtract(read(h + b * kBlock), block_at(row, b)), positive + b, negative + b);
  bool tie = false;
  for (int b = 0; b < kBatch; ++b) tie |= (positive[b] == negative[b]) & (positive[b] != 0);
  if (tie && !grid.symmetric)  // the first of equal extremes gives the sign
    for (int b = 0; b < blocks; ++b)
      if (positive[b] == negative[b] && positive[b] != 0) {
        const Block delta = subtract(read(h + b * kBlock), block_at(row, b));
        const bool minus = negative_first(delta, static_cast<uint32_t>(positive[b]));
        (minus ? positive : negative)[b] = 0;
      }

  BatchScales s;
  uint16_t rounded[kBatch];
  uint32_t worst = 0, unusual = !kFused;
  for (int b = 0; b < kBatch; ++b) {
    const bool minus = negative[b] > positive[b];
    const auto extreme = static_cast<uint32_t>(minus ? negative[b] : positive[b]);
    const uint16_t scale = grid.scale(extreme, minus);
    worst = worst > extreme ? worst : extreme;
    unusual |= !is_usual(scale);
    rounded[b] = scale;
    s.scale[b] = widen_scale(scale);
    s.reciprocal[b] = scale == 0 ? 0.0f : 1.0f / s.scale[b];
  }
  std::memcpy(scales, rounded, static_cast<size_t>(blocks) * sizeof *scales);

  const auto encode = [&]<bool USUAL>() {
    for (int b = 0; b < blocks; ++b)
      encode_block<BITS, USUAL>(grid, h + b * kBlock, block_at(row, b), s.scale[b],
                                s.reciprocal[b], count, codes + b * 4 * BITS,
                                block_at(new_row, b), squares);
  };
  if (unusual) encode.template operator()<false>();
  else encode.template operator()<true>();
  return worst;
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
    const uint16_t scale = *scales++ = grid.scale(extreme, negative != 0);
    const float divisor = scale == 0 ? as_float(kInfinity) : widen_scale(scale);
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
uint32_t encode_row_32(const Grid grid, size_t channels, const float* h, const Row* row,
                       uint8_t* codes, uint16_t* scales, Row* new_row, Squares* total) {
  // `grid` and `squares` are copies that nothing points to, so that they stay in registers: a
  // store to `codes` may alias anything else.
  Squares squares;
  uint32_t worst = 0;
  const size_t whole = channels / kBlock;
  for (size_t done = 0; done < whole; done += kBatch) {
    const int blocks = static_cast<int>(whole - done < kBatch ? whole - done : kBatch);
    const size_t c = kHasRow<Row> ? done * kBlock : 0;
    const uint32_t extreme =
        encode_blocks<BITS, Row>(grid, blocks, h + done * kBlock, row + c, kBlock,
                                 codes + done * 4 * BITS, scales + done, new_row + c, squares);
    worst = worst > extreme ? worst : extreme;
  }
  const size_t c = whole * kBlock;
  if (c < channels) {
    const size_t count = channels - c;
    float padded[kBlock] = {};
    Row old[kBlock] = {}, next[kBlock];
    uint8_t packed[4 * BITS];
    std::memcpy(padded, h + c, count * sizeof(float));
    if constexpr (kHasRow<Row>) std::memcpy(old, row + c, count * sizeof(Row));
    const uint32_t extreme = encode_blocks<BITS, Row>(
        grid, 1, padded, old, static_cast<int>(count), packed, scales + whole, next, squares);
    worst = worst > extreme ? worst : extreme;
    codes += whole * 4 * BITS;
    std::memcpy(codes, packed, (count * BITS + 7) / 8);
    if constexpr (kHasRow<Row>) std::memcpy(new_row + c, next, count * sizeof(Row));
  }
  *total = squares;
  return worst;
}

// Groups of several whole blocks, as rows of low bits have: a scale for all positions of a channel.
template <int BITS, class Row>
uint32_t encode_row_wide(const Grid grid, size_t channels, size_t group, const float* h,
                         const Row* row, uint8_t* codes, uint16_t* scales, Row* new_row,
                         Squares* total) {
  Squares squares;
  uint32_t worst = 0;
  const size_t blocks = channels / kBlock, per_group = group / kBlock;
  const auto at = [](auto* base, size_t b) { return block_at(base, static_cast<int>(b)); };
  for (size_t first = 0; first < blocks; first += per_group) {
    const size_t end = first + per_group < blocks ? first + per_group : blocks;
    uint32_t extreme = 0;
    bool minus = false;
    for (size_t b = first; b < end; ++b) {
      const Block delta = subtract(read(h + b * kBlock), at(row, b));
      int32_t positive, negative;
      find_extremes(delta, &positive, &negative);
      const auto most = static_cast<uint32_t>(positive > negative ? positive : negative);
      if (most > extreme) {  // the first of equal extremes gives the sign
        extreme = most;
        minus = positive == negative ? negative_first(delta, most) : negative > positive;
      }
    }
    worst = worst > extreme ? worst : extreme;
    const uint16_t rounded = *scales++ = grid.scale(extreme, minus);
    const float scale = widen_scale(rounded), reciprocal = rounded == 0 ? 0.0f : 1.0f / scale;
    const auto encode = [&]<bool USUAL>() {
      for (size_t b = first; b < end; ++b)
        encode_block<BITS, USUAL>(grid, h + b * kBlock, at(row, b), scale, reciprocal, kBlock,
                                  codes + b * 4 * BITS, at(new_row, b), squares);
    };
    if (kFused && is_usual(rounded)) encode.template operator()<true>();
    else encode.template operator()<false>();
  }
  *total = squares;
  return worst;
}

// Whether groups are several whole blocks, and so are rows.
inline bool is_wide(const Layout& layout) {
  return layout.group > kBlock && layout.group % kBlock == 0 && layout.channels % kBlock == 0;
}

// Rows that are whole blocks lie back to back in every buffer: they are worked on as rows of a
// length that suits the machine.
struct Span {
  explicit Span(const Layout& layout) : rest(layout.rows * layout.channels) {
    const bool whole = layout.group == kBlock && layout.channels % kBlock == 0;
    length = whole ? 2048 : layout.channels;
  }
  size_t next() {
    const size_t taken = length < rest ? length : rest;
    rest -= taken;
    return taken;
  }

  size_t rest, length;
};

template <int BITS, class Row>
size_t encode(const Layout& layout, const float* h, const Row* row, uint8_t* codes,
              uint16_t* scales, Row* new_row, Sums* sums) {
  const Grid grid(layout);
  size_t bad = 0;
  for (Span span(layout); span.rest > 0;) {
    const Layout part = {1, span.next(), layout.bits, layout.group, layout.symmetric};
    Squares squares;
    uint32_t worst;
    const bool fused = layout.group == kBlock || is_wide(layout);
    if (is_wide(layout))
      worst = encode_row_wide<BITS, Row>(grid, part.channels, part.group, h, row, codes, scales,
                                         new_row, &squares);
    else if (fused)
      worst = encode_row_32<BITS, Row>(grid, part.channels, h, row, codes, scales, new_row, &squares);
    else
      worst = encode_row<Row>(part, grid, h, row, codes, scales, new_row);
    bool good = worst < kInfinity;
    if constexpr (kHasRow<Row>) {
      const float value = sum(squares.value), delta = sum(squares.delta);
      if (fused && value > kSquaresLow && value < kSquaresHigh && delta < kSquaresHigh) {
        sums->delta += delta;
        sums->value += value;
        sums->error += sum(squares.error);
      } else if (good) {
        good = exact_sums<Row>(part, grid, h, row, codes, scales, new_row, sums);
      }
      row += part.channels;
      new_row += part.channels;
    }
    bad += !good;
    h += part.channels;
    codes += part.code_bytes();
    scales += part.num_groups();
  }
  return bad;
}

#include "decode.hpp"
#include "touch.hpp"

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

size_t touch(const Layout& layout, const uint8_t* codes, const uint16_t* scales, const void* row,
             bool streamed, float* out, void* new_row) {
  const size_t blocks = layout.rows * layout.channels / kBlock;
  return with_bits(layout.bits, [&]<int BITS>() {
    if (row != nullptr)
      return touch_streamed<BITS>(streamed, blocks, codes, scales,
                                  static_cast<const uint16_t*>(row), out,
                                  static_cast<uint16_t*>(new_row));
    return touch_streamed<BITS, NoRow>(streamed, blocks, codes, scales, nullptr, out, nullptr);
  });
}

}  // namespace

const Kernels& kernels() {
  static constexpr Kernels table = {RP_STRING(RAY_PIPE_ISA), quantize, dequantize, delta_encode,
                                    delta_decode, touch};
  return table;
}

}  // namespace RP_NAMESPACE
}  // namespace ray_pipe
