// Decoding: codes and scales back to values, and values onto rows. Part of kernels.cpp.
//
// In cache a decoder is bound by its stores, two cycles for each 64 bytes here, and beyond that by
// every instruction that does not fit beside them: no division, no horizontal step and no second
// pass over the scales inside these loops.

constexpr int kScales = 16;  // how many scales are looked at and widened at a time

// What a code of 0..2*full-1 stands for, times `scale`, plus `old`. The signed grid's values are
// products of 8 by 8 bits, 2**-140 and up, so that they are exact however they are taken: a code
// times scale/full, which is exact as well, and added without a rounding of its own.
template <int BITS, bool SYMMETRIC>
struct Decoder {
  explicit Decoder(const Grid& grid) : grid(grid) {}

  static constexpr bool kLooksUp = (1 << BITS) <= kTable;

  RP_INLINE float factor(uint16_t scale) const {
    if constexpr (kLooksUp || SYMMETRIC) return widen_scale(scale);
    return widen_scale(scale) * grid.per_level;
  }

  RP_INLINE Block values(const uint8_t* from, float factor) const {
    Block value;
    if constexpr (kLooksUp) {
      Ints codes[kParts];
      unpack<BITS>(from, codes);
      const Floats scaled = grid.values * factor;  // the products, taken before the lookup
      for (int p = 0; p < kParts; ++p) value.v[p] = lookup(scaled, codes[p]);
    } else {
      centred<BITS>(from, value.v);
      for (int p = 0; p < kParts; ++p) value.v[p] = scaled(value.v[p]) * factor;
    }
    return value;
  }

  RP_INLINE Block values_onto(const Block& old, const uint8_t* from, float factor) const {
    Block value;
    if constexpr (kLooksUp || SYMMETRIC) {
      value = values(from, factor);
      for (int p = 0; p < kParts; ++p) value.v[p] = old.v[p] + value.v[p];
    } else {
      centred<BITS>(from, value.v);
      for (int p = 0; p < kParts; ++p)
        value.v[p] = exact_product_plus(value.v[p], factor, old.v[p]);
    }
    return value;
  }

  RP_INLINE Floats scaled(Floats code) const {
    if constexpr (!SYMMETRIC) return code;
    return quotient(code, grid.levels, grid.per_level);
  }

  const Grid grid;  // a copy that nothing points to: a store to `out` may alias anything else
};

// Which outputs go past the caches, saving the read of every line before it is written: values that
// could not stay in the last cache until someone reads them, and earlier the new rows, which nobody
// reads before the sample comes again. Numbers in docs/lab-notes.md.
struct Past {
  bool values = false, rows = false;
};

template <class Row>
Past choose_past(const Layout& layout, const float* out, const Row* new_row) {
  const size_t count = layout.rows * layout.channels, row_bytes = kHasRow<Row> ? sizeof(Row) : 0;
  const auto is_aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 64 == 0; };
  Past past;
  past.values = count * sizeof *out > stream_beyond / 4 * 3 && is_aligned(out);
  past.rows = count * (sizeof *out + 2 * row_bytes) > stream_beyond / 4 * 3 && is_aligned(new_row);
  return past;
}

template <class Decoder, class Row>
RP_INLINE void decode_block(const Decoder& decoder, Past past, const uint8_t* codes, float factor,
                            const Row* row, float* out, Row* new_row) {
  Block next;
  if constexpr (kHasRow<Row>) {
    next = decoder.values_onto(read(row), codes, factor);
    if (past.rows) write<true>(new_row, next);
    else write<false>(new_row, next);
  } else {
    next = decoder.values(codes, factor);
  }
  if (past.values) write<true>(out, next);
  else write<false>(out, next);
}

typedef int16_t Scales __attribute__((vector_size(kScales * 2)));

// The scale of each of the next blocks; a group has one or more blocks.
struct GroupScales {
  RP_INLINE uint16_t next() {
    const uint16_t scale = *at;
    if (++taken == per_group) ++at, taken = 0;
    return scale;
  }

  // The next `count`; the others of 16 are 0.
  RP_INLINE Scales take(int count) {
    if (per_group == 1 && count == kScales) {
      at += kScales;
      return load<Scales>(at - kScales);
    }
    uint16_t found[kScales] = {};
    for (int b = 0; b < count; ++b) found[b] = next();
    return load<Scales>(found);
  }

  const uint16_t* at;
  size_t per_group, taken = 0;
};

// Blocks that lie back to back. Returns 0 unless all scales are finite.
template <int BITS, bool SYMMETRIC, class Row>
uint32_t decode_blocks(const Grid& grid, Past past, size_t blocks, size_t per_group,
                       const uint8_t* codes, const uint16_t* scales, const Row* row, float* out,
                       Row* new_row) {
  const Decoder<BITS, SYMMETRIC> decoder(grid);
  GroupScales group{scales, per_group};
  Scales bad{};
  const auto some = [&](int count) RP_INLINE_LAMBDA {
    const Scales narrow = group.take(count);
    bad |= (narrow & 0x7f80) == 0x7f80;
    alignas(64) float factors[kScales];  // so that one is spread over a vector as it is loaded
    for (int b = 0; b < kScales; ++b) factors[b] = decoder.factor(static_cast<uint16_t>(narrow[b]));
    for (int b = 0; b < count; ++b)
      decode_block(decoder, past, codes + b * 4 * BITS, factors[b], block_at(row, b),
                   out + b * kBlock, block_at(new_row, b));
    codes += count * 4 * BITS;
    out += count * kBlock;
    row = block_at(row, count);
    new_row = block_at(new_row, count);
  };
  for (; blocks >= kScales; blocks -= kScales) some(kScales);
  if (blocks > 0) some(static_cast<int>(blocks));
  uint64_t words[sizeof bad / sizeof(uint64_t)], any = 0;
  store(words, bad);
  for (const uint64_t word : words) any |= word;
  return any == 0;
}

// A row of groups of 32, or of several whole blocks.
template <int BITS, bool SYMMETRIC, class Row>
uint32_t decode_row_32(const Grid& grid, Past past, size_t channels, size_t per_group,
                       const uint8_t* codes, const uint16_t* scales, const Row* row, float* out, Row* new_row) {
  const size_t whole = channels / kBlock, c = whole * kBlock;
  uint32_t good =
      decode_blocks<BITS, SYMMETRIC>(grid, past, whole, per_group, codes, scales, row, out, new_row);
  if (c < channels) {
    const size_t count = channels - c;
    uint8_t packed[4 * BITS] = {};
    Row old[kBlock] = {}, next[kBlock];
    float values[kBlock];
    std::memcpy(packed, codes + whole * 4 * BITS, (count * BITS + 7) / 8);
    if constexpr (kHasRow<Row>) std::memcpy(old, row + c, count * sizeof(Row));
    good &= decode_blocks<BITS, SYMMETRIC>(grid, Past{}, 1, 1, packed, scales + whole, old, values,
                                           next);
    std::memcpy(out + c, values, count * sizeof(float));
    if constexpr (kHasRow<Row>) std::memcpy(new_row + c, next, count * sizeof(Row));
  }
  return good;
}

// Any other group: one value at a time.
template <class Row>
uint32_t decode_row(const Layout& layout, const Grid& grid, const uint8_t* codes,
                    const uint16_t* scales, const Row* row, float* out, Row* new_row) {
  uint32_t good = 1;
  for (size_t first = 0; first < layout.channels; first += layout.group, ++scales) {
    const size_t left = layout.channels - first;
    const size_t end = first + (left < layout.group ? left : layout.group);
    good &= is_finite(*scales);
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
  return good;
}

template <int BITS, class Row>
size_t decode(const Layout& layout, const uint8_t* codes, const uint16_t* scales, const Row* row,
              float* out, Row* new_row) {
  const Grid grid(layout);
  const bool fused = layout.group == kBlock || is_wide(layout);
  Layout part = {1, layout.channels, layout.bits, layout.group, layout.symmetric};
  size_t rows = layout.rows, bad = 0;
  if (layout.group == kBlock && layout.channels % kBlock == 0) {  // one long row of whole blocks
    part.channels *= rows;
    rows = part.channels > 0;
  }
  const Past past = part.channels % kBlock == 0 ? choose_past(layout, out, new_row) : Past{};
  for (size_t r = 0; r < rows; ++r) {
    uint32_t good;
    if (!fused)
      good = decode_row<Row>(part, grid, codes, scales, row, out, new_row);
    else if (layout.symmetric)
      good = decode_row_32<BITS, true>(grid, past, part.channels, part.group / kBlock, codes, scales, row,
                                       out, new_row);
    else
      good = decode_row_32<BITS, false>(grid, past, part.channels, part.group / kBlock, codes, scales,
                                        row, out, new_row);
    bad += !good;
    if constexpr (kHasRow<Row>) {
      row += part.channels;
      new_row += part.channels;
    }
    out += part.channels;
    codes += part.code_bytes();
    scales += part.num_groups();
  }
  if (past.values || past.rows) end_streams();
  return bad;
}
