// converting_test.cc: casts, float8 and maxima of each instruction set against arithmetic of one element at a time; blocks, turning round,
// and what is refused.
#include "asyncfabric/converting.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "all_kernels.h"

namespace asyncfabric::rows {
namespace {

using Bytes = std::vector<uint8_t>;

float value_of(uint32_t code) {  // of float8_e4m3fn, without its sign
  const uint32_t exponent = code >> 3, fraction = code & 7;
  return exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                       : std::ldexp(8.0F + static_cast<float>(fraction), static_cast<int>(exponent) - 10);
}

// The nearest of all codes, the even one of two that are as near.
uint8_t nearest(float value) {
  const uint32_t sign = std::bit_cast<uint32_t>(value) >> 31 << 7;
  if (std::isnan(value)) return static_cast<uint8_t>(sign | 0x7f);
  const double size = std::min(std::abs(static_cast<double>(value)), 448.0);
  uint32_t best = 0;
  for (uint32_t code = 1; code < 0x7f; ++code) {
    const double now = std::abs(value_of(best) - size), then = std::abs(value_of(code) - size);
    if (then < now || (then == now && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(sign | best);
}

std::vector<float> awkward(size_t count) {
  std::mt19937 random(5);
  std::vector<float> found{0.0F,
                           -0.0F,
                           448.0F,
                           464.0F,
                           -1e9F,
                           0x1p-10F,
                           0x3p-10F,
                           0x1p-6F,
                           0x1p-149F,
                           INFINITY,
                           -INFINITY,
                           std::numeric_limits<float>::quiet_NaN(),
                           -std::numeric_limits<float>::quiet_NaN()};
  for (uint32_t code = 0; code < 0x7e; ++code) found.push_back((value_of(code) + value_of(code + 1)) / 2);
  while (found.size() < count) found.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
  return found;
}

Bytes stored(const std::vector<float>& values) {
  Bytes found(values.size() * sizeof(float));
  std::memcpy(found.data(), values.data(), found.size());
  return found;
}

Bytes upper_halves(const std::vector<float>& values) {  // as bfloat16, cut
  Bytes found(values.size() * 2);
  for (size_t at = 0; at < values.size(); ++at)
    std::memcpy(&found[at * 2], reinterpret_cast<const uint8_t*>(&values[at]) + 2, 2);
  return found;
}

float cut(float value) { return std::bit_cast<float>(std::bit_cast<uint32_t>(value) & 0xffff0000); }

TEST(Converting, Float8IsTheNearestCodeWithEachInstructionSetAndEachWidth) {
  const std::vector<float> values = awkward(3000);
  for (const Kernels* kernels : all_kernels()) {
    for (const size_t width : {size_t{1}, size_t{15}, size_t{16}, size_t{17}, values.size()}) {
      Bytes codes(width + 1, 0x55), cut_codes(width + 1, 0x55);
      kernels->quantise[2](codes.data(), stored(values).data(), 1.0F, width);
      kernels->quantise[0](cut_codes.data(), upper_halves(values).data(), 3.0F, width);
      for (size_t at = 0; at < width; ++at) {
        ASSERT_EQ(codes[at], nearest(values[at])) << kernels->name << ": " << values[at];
        ASSERT_EQ(cut_codes[at], nearest(cut(values[at]) / 3.0F)) << kernels->name << ": " << cut(values[at]);
      }
      EXPECT_EQ(codes[width], 0x55) << kernels->name << " wrote behind the row";
      EXPECT_EQ(cut_codes[width], 0x55);
    }
  }
}

TEST(Converting, CastsRoundToNearestEvenAndWidenExactly) {
  const std::vector<float> values = awkward(1001);
  for (const Kernels* kernels : all_kernels()) {
    Bytes narrow(values.size() * 2), wide(values.size() * 4);
    kernels->cast[2][0](narrow.data(), stored(values).data(), values.size());
    kernels->cast[0][2](wide.data(), upper_halves(values).data(), values.size());
    for (size_t at = 0; at < values.size(); ++at) {
      uint16_t half;
      float whole;
      std::memcpy(&half, &narrow[at * 2], sizeof half);
      std::memcpy(&whole, &wide[at * 4], sizeof whole);
      ASSERT_EQ(std::bit_cast<uint32_t>(whole), std::bit_cast<uint32_t>(cut(values[at]))) << kernels->name;
      if (std::isnan(values[at])) {
        ASSERT_EQ(half, 0x7fc0);
        continue;
      }
      const auto bits = std::bit_cast<uint32_t>(values[at]);
      const uint32_t low = bits & 0xffff, up = bits >> 16;
      ASSERT_EQ(half, up + (low > 0x8000 || (low == 0x8000 && up % 2 == 1))) << kernels->name << ": " << values[at];
    }
  }
}

// To nearest, even, by halving steps of doubles; what is no number keeps as many of its bits as there is room for, as numpy does.
uint16_t half_of(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  if (std::isnan(value)) return sign | 0x7c00 | std::max<uint16_t>(1, bits >> 13 & 0x3ff);
  const double size = std::abs(static_cast<double>(value));
  if (size >= 65520.0) return sign | 0x7c00;
  const int power = size < 0x1p-14 ? -14 : std::ilogb(size);
  const auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, 10 - power)));  // of 2**(power - 10)
  return static_cast<uint16_t>(sign | ((static_cast<uint32_t>(power + 14) << 10) + steps));
}

uint32_t widened(uint16_t half) {  // the bits of the fp32
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
  if (exponent == 31) return sign | 0x7f800000 | fraction << 13;
  const float size = exponent == 0
                         ? std::ldexp(static_cast<float>(fraction), -24)
                         : std::ldexp(1024.0F + static_cast<float>(fraction), static_cast<int>(exponent) - 25);
  return sign | std::bit_cast<uint32_t>(size);
}

template <class To>
To element(const Bytes& from, size_t at) {
  To found;
  std::memcpy(&found, &from[at * sizeof(To)], sizeof found);
  return found;
}

TEST(Converting, EachHalfWidensToItselfAndComesBackWithEachInstructionSet) {
  Bytes halves(2 * 65536);
  for (uint32_t code = 0; code < 65536; ++code) std::memcpy(&halves[2 * code], &code, 2);
  for (const Kernels* kernels : all_kernels()) {
    Bytes wide(4 * 65536), back(2 * 65536);
    kernels->cast[1][2](wide.data(), halves.data(), 65536);
    kernels->cast[2][1](back.data(), wide.data(), 65536);
    for (size_t code = 0; code < 65536; ++code)
      ASSERT_EQ(element<uint32_t>(wide, code), widened(static_cast<uint16_t>(code))) << kernels->name << ": " << code;
    EXPECT_EQ(back, halves) << kernels->name;
  }
}

TEST(Converting, HalvesAreTheNearestOnesWithEachInstructionSetAndEachWidth) {
  std::vector<float> values = awkward(3000);
  for (uint32_t half = 0; half < 0x7c00; half += 3) {  // ties, and their neighbours
    const uint32_t tie = (widened(static_cast<uint16_t>(half)) + widened(static_cast<uint16_t>(half + 1))) / 2;
    for (const uint32_t each : {tie - 1, tie, tie + 1, tie | 0x80000000}) values.push_back(std::bit_cast<float>(each));
  }
  for (const uint32_t each :
       {0x33000000U, 0x33000001U, 0x477fefffU, 0x477ff000U, 0x7f800001U, 0xff801fffU, 0x7fc02000U})
    values.push_back(std::bit_cast<float>(each));
  for (const Kernels* kernels : all_kernels()) {
    for (const size_t width : {size_t{1}, size_t{15}, size_t{16}, size_t{17}, values.size()}) {
      Bytes narrow(2 * width + 2, 0x55), cut_narrow(2 * width + 2, 0x55);
      kernels->cast[2][1](narrow.data(), stored(values).data(), width);
      kernels->cast[0][1](cut_narrow.data(), upper_halves(values).data(), width);
      for (size_t at = 0; at < width; ++at) {
        ASSERT_EQ(element<uint16_t>(narrow, at), half_of(values[at])) << kernels->name << ": " << values[at];
        ASSERT_EQ(element<uint16_t>(cut_narrow, at), half_of(cut(values[at]))) << kernels->name << ": " << values[at];
      }
      EXPECT_EQ(element<uint16_t>(narrow, width), 0x5555) << kernels->name << " wrote behind the row";
      EXPECT_EQ(element<uint16_t>(cut_narrow, width), 0x5555);
    }
  }
}

TEST(Converting, TilesOfAllSizesAreTurnedRoundByEachInstructionSet) {
  std::mt19937 random(3);
  for (const Kernels* kernels : all_kernels())
    for (const size_t item : {size_t{1}, size_t{2}, size_t{4}})
      for (const auto& [rows, columns] : {std::pair{128, 128}, {1, 1}, {17, 5}, {127, 33}, {8, 128}, {128, 3}})
        for (const bool past : {false, true}) {
          const size_t pitch = 128 * item + 64, stride = rows * item + (past ? 64 - rows * item % 64 : 5);
          Bytes tile(128 * pitch), memory(columns * stride + 64, 0x55);
          for (uint8_t& each : tile) each = static_cast<uint8_t>(random());
          uint8_t* const target = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
          kernels->turn[item / 2](target, static_cast<ptrdiff_t>(stride), tile.data(), pitch, rows, columns, past);
          for (size_t column = 0; column < static_cast<size_t>(columns); ++column) {
            for (size_t row = 0; row < static_cast<size_t>(rows); ++row)
              ASSERT_EQ(std::memcmp(target + column * stride + row * item, &tile[row * pitch + column * item], item), 0)
                  << kernels->name << ", elements of " << item << ": " << row << ", " << column;
            for (size_t byte = rows * item; byte < stride; ++byte) ASSERT_EQ(target[column * stride + byte], 0x55);
          }
        }
}

struct Matrix {
  static constexpr size_t kRows = 300, kColumns = 420, kRow = 37, kColumn = 101;  // begins within a block
  static constexpr size_t kDown = 3, kAcross = 5;
  static constexpr size_t kStride = kColumns * 4 + 28;
  Bytes bytes = Bytes(kRows * kStride);
  std::vector<float> scales;

  Matrix() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (size_t row = 0; row < kRows; ++row)
      for (size_t column = 0; column < kColumns; ++column) set(row, column, normal(random));
    for (size_t block = 0; block < kDown * kAcross; ++block) scales.push_back(0.001F * static_cast<float>(block + 1));
  }
  void set(size_t row, size_t column, float value) { std::memcpy(&bytes[row * kStride + column * 4], &value, 4); }
  float at(size_t row, size_t column) const {
    float value;
    std::memcpy(&value, &bytes[row * kStride + column * 4], 4);
    return value;
  }
  static size_t block(size_t row, size_t column) { return (row + kRow) / 128 * kAcross + (column + kColumn) / 128; }
  Plane plane() const { return {bytes.data(), kRows, kColumns * 4, kStride, RowKind::kFloat32}; }
};

TEST(Converting, EachElementHasTheScaleOfItsBlockAlsoTurnedRound) {
  const Matrix matrix;
  constexpr size_t kFirst = Matrix::kColumns + 3, kSecond = Matrix::kRows + 5;
  Bytes plain(Matrix::kRows * kFirst, 0x55), turned(Matrix::kColumns * kSecond, 0x55);
  ASSERT_TRUE(quantise_plane(matrix.plane(), Matrix::kRow, Matrix::kColumn, matrix.scales,
                             {plain.data(), Matrix::kRows, Matrix::kColumns, kFirst, false}));
  ASSERT_TRUE(quantise_plane(matrix.plane(), Matrix::kRow, Matrix::kColumn, matrix.scales,
                             {turned.data(), Matrix::kColumns, Matrix::kRows, kSecond, true}));
  for (size_t row = 0; row < Matrix::kRows; ++row)
    for (size_t column = 0; column < Matrix::kColumns; ++column) {
      const uint8_t code = nearest(matrix.at(row, column) / matrix.scales[Matrix::block(row, column)]);
      ASSERT_EQ(plain[row * kFirst + column], code) << row << ", " << column;
      ASSERT_EQ(turned[column * kSecond + row], code) << row << ", " << column;
    }
  for (size_t row = 0; row < Matrix::kRows; ++row) EXPECT_EQ(plain[row * kFirst + Matrix::kColumns], 0x55);
  for (size_t column = 0; column < Matrix::kColumns; ++column)
    EXPECT_EQ(turned[column * kSecond + Matrix::kRows], 0x55);
}

TEST(Converting, MaximaAreThoseOfEachBlockAndNoNumberIsLargest) {
  Matrix matrix;
  matrix.set(299, 419, -1000.0F);
  matrix.set(0, 0, std::numeric_limits<float>::quiet_NaN());
  std::vector<float> wanted(Matrix::kDown * Matrix::kAcross), found(wanted.size(), -1.0F);
  for (size_t row = 0; row < Matrix::kRows; ++row)
    for (size_t column = 0; column < Matrix::kColumns; ++column) {
      float& most = wanted[Matrix::block(row, column)];
      most = std::max(most, std::abs(matrix.at(row, column)));
    }
  ASSERT_TRUE(measure_plane(matrix.plane(), Matrix::kRow, Matrix::kColumn, found));
  EXPECT_TRUE(std::isnan(found[0]));
  for (size_t block = 1; block < wanted.size(); ++block) EXPECT_EQ(found[block], wanted[block]) << block;
  EXPECT_EQ(found.back(), 1000.0F);
}

TEST(Converting, CastsAreTurnedRoundToo) {
  const Matrix matrix;
  Bytes turned(Matrix::kColumns * Matrix::kRows * 2);
  const PlaneTarget target{turned.data(), Matrix::kColumns, Matrix::kRows * 2, Matrix::kRows * 2, true};
  ASSERT_TRUE(cast_plane(matrix.plane(), RowKind::kBfloat16, target));
  for (size_t row = 0; row < Matrix::kRows; row += 7)
    for (size_t column = 0; column < Matrix::kColumns; ++column) {
      const auto bits = std::bit_cast<uint32_t>(matrix.at(row, column));
      uint16_t half;
      std::memcpy(&half, &turned[(column * Matrix::kRows + row) * 2], sizeof half);
      ASSERT_EQ(half, (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

TEST(Converting, WhatDoesNotFitIsRefusedAndNothingIsWritten) {
  const Matrix matrix;
  Bytes memory(Matrix::kRows * Matrix::kColumns * 4, 0x55);
  const PlaneTarget target{memory.data(), Matrix::kRows, Matrix::kColumns, Matrix::kColumns, false};
  const auto refused = [&](const Plane& plane, size_t row, size_t column, size_t scales, const PlaneTarget& into) {
    return !quantise_plane(plane, row, column, std::span(matrix.scales).first(scales), into);
  };
  EXPECT_TRUE(refused(matrix.plane(), Matrix::kRow, Matrix::kColumn, 14, target)) << "a scale is missing";
  EXPECT_TRUE(refused(matrix.plane(), 128, Matrix::kColumn, 15, target)) << "begins in another block";
  PlaneTarget wrong = target;
  wrong.turned = true;
  EXPECT_TRUE(refused(matrix.plane(), Matrix::kRow, Matrix::kColumn, 15, wrong)) << "is not turned round";
  wrong = target;
  wrong.row_bytes -= 1;
  EXPECT_TRUE(refused(matrix.plane(), Matrix::kRow, Matrix::kColumn, 15, wrong)) << "rows are too short";
  Plane odd = matrix.plane();
  odd.row_bytes -= 2;
  EXPECT_TRUE(refused(odd, Matrix::kRow, Matrix::kColumn, 15, target)) << "half an element";
  EXPECT_FALSE(cast_plane(matrix.plane(), RowKind::kFloat32, target)) << "nothing to convert";
  std::vector<float> few(14);
  EXPECT_FALSE(measure_plane(matrix.plane(), Matrix::kRow, Matrix::kColumn, few));
  EXPECT_EQ(static_cast<size_t>(std::count(memory.begin(), memory.end(), 0x55)), memory.size());
}

}  // namespace
}  // namespace asyncfabric::rows
