// rows_test.cc: the row loops: each instruction set against arithmetic done one element at a time, and what is refused.
#include "asyncfabric/rows.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "all_kernels.h"
#include "rigs/row_parts.h"

namespace asyncfabric::rows {
namespace {

// Conversions by the definition, with the mathematics library: slow, and nothing in common with the loops.
float from_half(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const float sign = (bits & 0x8000) != 0 ? -1.0F : 1.0F;
  if (exponent == 31)
    return fraction != 0 ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
}

uint16_t to_half(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (size >= 65520.0F) return sign | 0x7c00;
  if (size < std::ldexp(1.0F, -14)) return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(size, 24)));
  const int exponent = std::ilogb(size);
  const auto fraction = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, 10 - exponent)));  // 1024..2048
  return sign | static_cast<uint16_t>(((exponent + 14) << 10) + static_cast<int>(fraction));
}

float from_bfloat(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t to_bfloat(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t below = bits & 0xffff, kept = bits >> 16;
  return static_cast<uint16_t>(below > 0x8000 || (below == 0x8000 && (kept & 1) != 0) ? kept + 1 : kept);
}

float widened(RowKind kind, const uint8_t* row, size_t at) {
  if (kind == RowKind::kFloat32) return reinterpret_cast<const float*>(row)[at];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(row)[at];
  return kind == RowKind::kBfloat16 ? from_bfloat(bits) : from_half(bits);
}

void expect_element(RowKind kind, const uint8_t* row, size_t at, float wanted, const char* name) {
  if (kind == RowKind::kFloat32) {
    ASSERT_EQ(std::bit_cast<uint32_t>(reinterpret_cast<const float*>(row)[at]), std::bit_cast<uint32_t>(wanted))
        << name;
    return;
  }
  const uint16_t found = reinterpret_cast<const uint16_t*>(row)[at];
  ASSERT_EQ(found, kind == RowKind::kBfloat16 ? to_bfloat(wanted) : to_half(wanted)) << name << " of " << wanted;
}

class EachKind : public ::testing::TestWithParam<RowKind> {};
INSTANTIATE_TEST_SUITE_P(Rows, EachKind, ::testing::Values(RowKind::kBfloat16, RowKind::kFloat16, RowKind::kFloat32));

TEST_P(EachKind, SumsHaveTheBitsOfOneElementAtATime) {
  const RowKind kind = GetParam();
  const size_t bytes = kind == RowKind::kFloat32 ? 4 : 2;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (const size_t width : {16U, 48U, 64U, 208U}) {
    for (const size_t count : {0U, 1U, 2U, 7U}) {
      std::vector<std::vector<uint8_t>> rows(count, std::vector<uint8_t>(width * bytes));
      std::vector<const uint8_t*> sources;
      std::vector<float> weights(count);
      for (auto& row : rows) {
        for (size_t at = 0; at < width; ++at) {
          const float value = std::ldexp(normal(random), static_cast<int>(random() % 24) - 16);
          if (kind == RowKind::kFloat32) {
            reinterpret_cast<float*>(row.data())[at] = value;
          } else {
            reinterpret_cast<uint16_t*>(row.data())[at] =
                kind == RowKind::kBfloat16 ? to_bfloat(value) : to_half(value);
          }
        }
        sources.push_back(row.data());
      }
      for (float& weight : weights) weight = normal(random);
      for (const Kernels* kernels : all_kernels()) {
        for (const bool weighted : {true, false}) {
          std::vector<uint8_t> target(width * bytes + 1, 0xA5);
          kernels->sum[static_cast<size_t>(kind)](target.data(), sources.data(), weighted ? weights.data() : nullptr,
                                                  count, width);
          std::vector<float> carried(width, 0.25F);
          kernels->carry[static_cast<size_t>(kind)](carried.data(), sources.data(), count, width);
          for (size_t at = 0; at < width; ++at) {
            float sum = 0.0F, carry = 0.25F;
            for (size_t source = 0; source < count; ++source) {
              const float value = widened(kind, sources[source], at);
              const volatile float product = weighted ? weights[source] * value : value;  // rounded on its own
              sum += product;
              carry += value;
            }
            ASSERT_NO_FATAL_FAILURE(expect_element(kind, target.data(), at, sum, kernels->name));
            ASSERT_EQ(carried[at], carry) << kernels->name;
          }
          ASSERT_EQ(target.back(), 0xA5);
        }
      }
    }
  }
}

TEST(Rows, EveryHalfIsReadAndRoundedRight) {
  constexpr size_t kAll = 1 << 16;
  std::vector<uint16_t> every(kAll), target(kAll);
  std::iota(every.begin(), every.end(), 0);
  const auto* source = reinterpret_cast<const uint8_t*>(every.data());
  // 1: as it is; the others round: ties, values below the normal range and above the largest.
  for (const float weight : {1.0F, 0.75F, 1.0F / 1024, 1.0F / 3, 1.0004883F, 40.0F}) {
    for (const Kernels* kernels : all_kernels()) {
      kernels->sum[static_cast<size_t>(RowKind::kFloat16)](reinterpret_cast<uint8_t*>(target.data()), &source, &weight,
                                                           1, kAll);
      for (size_t bits = 0; bits < kAll; ++bits) {
        const float wanted = 0.0F + weight * from_half(static_cast<uint16_t>(bits));
        if (std::isnan(wanted))
          ASSERT_GT(target[bits] & 0x7fff, 0x7c00) << kernels->name << " " << bits;
        else
          ASSERT_EQ(target[bits], to_half(wanted)) << kernels->name << " " << bits << " " << weight;
      }
    }
  }
}

TEST(Rows, NoNumberStaysNoNumberInBfloat16) {
  std::vector<uint16_t> source(16, 0x7fff), target(16);
  const auto* bytes = reinterpret_cast<const uint8_t*>(source.data());
  for (const Kernels* kernels : all_kernels()) {
    kernels->sum[0](reinterpret_cast<uint8_t*>(target.data()), &bytes, nullptr, 1, 16);
    for (const uint16_t bits : target) ASSERT_TRUE(std::isnan(from_bfloat(bits))) << kernels->name;
  }
}

TEST(Rows, StreamingCopiesAreWhole) {
  alignas(64) uint8_t target[512];
  std::vector<uint8_t> source(513);
  std::iota(source.begin(), source.end(), 0);
  for (const Kernels* kernels : all_kernels()) {
    std::fill(std::begin(target), std::end(target), 0);
    kernels->stream(target, source.data() + 1, sizeof target);
    ASSERT_TRUE(std::equal(std::begin(target), std::end(target), source.begin() + 1)) << kernels->name;
  }
}

// What is refused leaves the target as it was.
class Refusals : public ::testing::Test {
 protected:
  std::vector<uint8_t> from_ = std::vector<uint8_t>(4 * 64, 1), into_ = std::vector<uint8_t>(4 * 64, 0xA5);
  Source source_{from_.data(), 4, 64};
  Target target_{into_.data(), 4, 64};
  std::vector<int64_t> offsets_{0, 1, 2, 3, 4}, position_{0, 1, 2, 3};
  std::vector<float> weights_{1, 1, 1, 1};

  void expect_untouched() { EXPECT_EQ(into_, std::vector<uint8_t>(4 * 64, 0xA5)); }
};

TEST_F(Refusals, IndexesThatPointOutside) {
  for (const int64_t bad : {int64_t{-1}, int64_t{4}, INT64_MAX, INT64_MIN}) {
    const std::vector<int64_t> index{0, 1, bad, 2};
    EXPECT_FALSE(take_rows(source_, index, going_to(target_)));
    EXPECT_FALSE(spread_rows(coming_from(source_), offsets_, index, target_));
    const ComingRows picking{0, 4, source_, true, index};
    EXPECT_FALSE(spread_rows({&picking, 1}, offsets_, position_, target_));
    EXPECT_FALSE(weigh_rows(source_, RowKind::kFloat32, offsets_, index, weights_, going_to(target_)));
    const std::vector<Part> parts{{0, 4, 0}};
    EXPECT_FALSE(add_rows(source_, RowKind::kFloat32, index, parts, target_));
  }
  for (const std::vector<int64_t>& bad :
       std::vector<std::vector<int64_t>>{{0, 1, 2, 3}, {0}, {0, 1, 2, 3, 5}, {0, 2, 1, 3, 4}, {-1, 0, 1, 2, 3}, {}}) {
    EXPECT_FALSE(spread_rows(coming_from(source_), bad, position_, target_));
    EXPECT_FALSE(weigh_rows(source_, RowKind::kFloat32, bad, position_, weights_, going_to(target_)));
  }
  expect_untouched();
}

TEST_F(Refusals, PartsWithoutRowsOrRoom) {
  const Target narrow{into_.data(), 4, 32}, few{into_.data(), 1, 64};
  const Source thin{from_.data(), 4, 32}, one{from_.data(), 1, 64};
  const GoingRows right{0, 1, target_};
  for (const GoingRows& bad :
       {GoingRows{0, 5, target_}, GoingRows{2, 1, target_}, GoingRows{-1, 2, target_},
        GoingRows{INT64_MIN, INT64_MAX, target_}, GoingRows{1, 3, few}, GoingRows{0, 1, narrow}}) {
    const std::vector<GoingRows> parts{right, bad};
    EXPECT_FALSE(take_rows(source_, position_, parts));
    EXPECT_FALSE(weigh_rows(source_, RowKind::kFloat32, offsets_, position_, weights_, parts));
  }
  const std::vector<int64_t> short_index{0};
  for (const ComingRows& bad :
       {ComingRows{0, 5, source_, false, {}}, ComingRows{2, 1, source_, false, {}},
        ComingRows{-1, 2, source_, false, {}}, ComingRows{1, 3, one, false, {}}, ComingRows{0, 1, thin, false, {}},
        ComingRows{1, 3, source_, true, short_index}, ComingRows{0, 1, source_, true, {}}}) {
    const std::vector<ComingRows> parts{{0, 1, source_, false, {}}, bad};
    EXPECT_FALSE(spread_rows(parts, offsets_, position_, target_));
  }
  expect_untouched();
}

TEST_F(Refusals, PartsThatPointOutside) {
  for (const Part bad : {Part{0, 5, 0}, Part{2, 1, 0}, Part{-1, 2, 0}, Part{0, 2, 3}, Part{0, 2, -1}, Part{0, 0, 5}}) {
    const std::vector<Part> parts{{0, 1, 0}, bad};
    std::vector<float> sums(4 * 16, 1);
    EXPECT_FALSE(add_rows(source_, RowKind::kFloat32, position_, parts, target_));
    EXPECT_FALSE(gather_sums(source_, RowKind::kFloat32, position_, parts, sums));
    EXPECT_EQ(sums, std::vector<float>(4 * 16, 1));
  }
  const std::vector<int64_t> twice{0, 1, 1, 2};
  const std::vector<Part> parts{{0, 4, 0}};
  EXPECT_FALSE(add_rows(source_, RowKind::kFloat32, twice, parts, target_)) << "a token has one row of each part";
  expect_untouched();
}

TEST_F(Refusals, WidthsThatAreNotWholeVectorsAndOtherKinds) {
  const Source odd{from_.data(), 4, 40};
  const Target narrow{into_.data(), 4, 40};
  EXPECT_FALSE(weigh_rows(odd, RowKind::kFloat32, offsets_, position_, weights_, going_to(narrow)));
  EXPECT_FALSE(weigh_rows(source_, static_cast<RowKind>(3), offsets_, position_, weights_, going_to(target_)));
  EXPECT_FALSE(take_rows(odd, position_, going_to(target_)));
  std::vector<float> sums(17);
  EXPECT_FALSE(gather_sums(source_, RowKind::kFloat32, position_, {}, sums));
  expect_untouched();
}

TEST_F(Refusals, PairsThatHaveNoPlace) {
  const std::vector<int32_t> experts{0, 1, -1, 1};
  const std::vector<float> weights{1, 2, 3, 4}, less{1, 2, 3};
  std::vector<int64_t> counts(2), begins(3), offsets(3), few(2), three(3), row_of(4, 7), choice_of(4, 7);
  std::vector<float> two(2), factors(3);
  EXPECT_EQ(count_pairs(experts, 2, 0, 2, counts, begins, offsets), 3);
  EXPECT_EQ(counts, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(begins, (std::vector<int64_t>{0, 2, 4}));
  EXPECT_EQ(offsets, (std::vector<int64_t>{0, 2, 3}));
  EXPECT_FALSE(place_pairs(experts, weights, 2, 0, begins, {few, two, row_of, choice_of}));
  EXPECT_FALSE(place_pairs(experts, weights, 2, 0, begins, {three, two, row_of, choice_of}));
  EXPECT_FALSE(place_pairs(experts, less, 2, 0, begins, {three, factors, row_of, choice_of}));
  EXPECT_FALSE(place_pairs(experts, weights, 2, 0, begins, {three, factors, row_of, std::span(choice_of).first(3)}));
  EXPECT_FALSE(place_pairs(experts, weights, 2, 0, {}, {three, factors, row_of, choice_of}));
  for (const std::vector<int64_t>& bad : std::vector<std::vector<int64_t>>{{0, 3, 4}, {-1, 2, 4}, {INT64_MAX, 2, 4}})
    EXPECT_FALSE(place_pairs(experts, weights, 2, 0, bad, {three, factors, row_of, choice_of}));
  EXPECT_TRUE(place_pairs(experts, weights, 2, 0, begins, {three, factors, row_of, choice_of}));
  EXPECT_EQ(three, (std::vector<int64_t>{0, 2, 3}));
  EXPECT_EQ(factors, (std::vector<float>{1, 2, 4}));
  EXPECT_EQ(row_of, (std::vector<int64_t>{0, -1, 0, 1}));
  EXPECT_EQ(choice_of, (std::vector<int64_t>{0, -1, 1, 1}));
  EXPECT_EQ(count_pairs(experts, 2, 0, 0, counts, begins, offsets), -1) << "no alignment";
  EXPECT_EQ(count_pairs(experts, 2, 0, 2, counts, std::span(begins).first(2), offsets), -1);
  EXPECT_EQ(count_pairs(experts, 2, 0, 2, counts, begins, std::span(offsets).first(2)), -1);
  EXPECT_EQ(count_pairs(experts, 2, 0, 2, counts, begins, {}), -1);
}

}  // namespace
}  // namespace asyncfabric::rows
