// records_test.cc: routes and records against what they are made from, and heads that lie: nothing outside is touched.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "asyncfabric/rows.h"

namespace asyncfabric::rows {
namespace {

constexpr size_t kMembers = 3, kChoices = 2, kScales = 1, kTokens = 5, kMost = 6;
constexpr size_t kHeadBytes = 48, kMetaBytes = 4 * (1 + 2 * kChoices + kScales);

// Three members, each with an expert; what one of them sends to all, in fronts of its own memory.
class Records : public ::testing::Test {
 protected:
  Records() {
    std::iota(origins_.begin(), origins_.end(), 100);
    std::iota(weights_.begin(), weights_.end(), 0.5F);
    std::iota(scales_.begin(), scales_.end(), 7.0F);
    const int64_t used = plan_route(experts_, kChoices, owner_, tokens_, offsets_);
    tokens_.resize(static_cast<size_t>(used));
    for (auto& memory : memory_) memory.assign(kHeadBytes + kMost * kMetaBytes, 0xA5);
    for (size_t member = 0; member < kMembers; ++member) fronts_.emplace_back(memory_[member]);
  }

  bool write() { return write_records(fronts_, 1, 9, about(), owner_, tokens_, offsets_); }
  About about() const { return {origins_, experts_, weights_, scales_, kChoices, kScales}; }
  RecordHead& head(size_t member) {
    return *reinterpret_cast<RecordHead*>(fronts_[member].data() + fronts_[member].size() - kHeadBytes);
  }
  uint32_t& announced(size_t sender, size_t receiver) {
    return reinterpret_cast<uint32_t*>(&head(sender) + 1)[receiver];
  }
  // Makes the three fronts those that members 0, 1 and 2 wrote for member 0.
  void write_all() {
    const std::vector<std::span<uint8_t>> fronts = fronts_;
    std::vector<std::vector<uint8_t>> kept(kMembers);
    for (uint32_t sender = 0; sender < kMembers; ++sender) {
      ASSERT_TRUE(write_records(fronts_, sender, 9, about(), owner_, tokens_, offsets_));
      kept[sender] = memory_[0];
    }
    for (size_t sender = 0; sender < kMembers; ++sender)
      std::memcpy(fronts_[sender].data(), kept[sender].data(), kept[sender].size());
  }
  HeadCheck read(uint64_t step = 9) { return read_heads(fronts_, 0, step, kMost, counts_, begins_); }
  bool untouched() const {
    for (const auto& memory : memory_)
      if (memory != std::vector<uint8_t>(memory.size(), 0xA5)) return false;
    return true;
  }

  std::vector<int32_t> origins_ = std::vector<int32_t>(kTokens), experts_{0, 1, 1, 1, -1, 2, 2, 0, 3, -1};
  std::vector<float> weights_ = std::vector<float>(kTokens * kChoices), scales_ = std::vector<float>(kTokens);
  std::vector<int64_t> owner_{0, 1, 2, -1}, tokens_ = std::vector<int64_t>(kTokens * kChoices),
                                            offsets_ = std::vector<int64_t>(kMembers + 1);
  std::vector<uint8_t> memory_[kMembers];
  std::vector<std::span<uint8_t>> fronts_;
  std::vector<int64_t> counts_ = std::vector<int64_t>(kMembers * kMembers), begins_ = offsets_;
};

TEST_F(Records, RoutesHaveEachTokenOnceForEachMember) {
  EXPECT_EQ(offsets_, (std::vector<int64_t>{0, 2, 4, 6}));
  EXPECT_EQ(tokens_, (std::vector<int64_t>{0, 3, 0, 1, 2, 3}));
}

TEST_F(Records, RoutesOfWhatDoesNotExistAreRefused) {
  for (const int32_t bad : {4, -2, INT32_MAX, INT32_MIN}) {
    std::vector<int32_t> other = experts_;
    other.back() = bad;
    EXPECT_EQ(plan_route(other, kChoices, owner_, tokens_, offsets_), -1) << bad;
    const About about{origins_, other, weights_, scales_, kChoices, kScales};
    EXPECT_FALSE(write_records(fronts_, 1, 9, about, owner_, tokens_, offsets_)) << bad;
  }
  for (const int64_t bad : {int64_t{3}, int64_t{-2}, INT64_MAX}) {
    const std::vector<int64_t> other{0, 1, bad, -1};
    EXPECT_EQ(plan_route(experts_, kChoices, other, tokens_, offsets_), -1) << bad;
  }
  std::vector<int64_t> few(5);
  EXPECT_EQ(plan_route(experts_, kChoices, owner_, few, offsets_), -1) << "six are needed";
  EXPECT_TRUE(untouched());
}

TEST_F(Records, TokensAndFrontsThatDoNotFitAreRefusedBeforeAnythingIsWritten) {
  for (const int64_t bad : {int64_t{-1}, static_cast<int64_t>(kTokens), INT64_MIN}) {
    std::vector<int64_t> other = tokens_;
    other.back() = bad;
    EXPECT_FALSE(write_records(fronts_, 1, 9, about(), owner_, other, offsets_)) << bad;
  }
  for (const std::vector<int64_t>& bad :
       std::vector<std::vector<int64_t>>{{}, {0, 2, 4}, {0, 2, 4, 7}, {0, 4, 2, 6}, {-1, 2, 4, 6}, {1, 2, 4, 6}})
    EXPECT_FALSE(write_records(fronts_, 1, 9, about(), owner_, tokens_, bad));
  fronts_[2] = fronts_[2].last(kHeadBytes + 2 * kMetaBytes - 1);
  EXPECT_FALSE(write());
  fronts_[2] = fronts_[2].last(kHeadBytes - 1);
  EXPECT_FALSE(write());
  EXPECT_TRUE(untouched());
}

TEST_F(Records, WhatIsReadIsWhatWasWritten) {
  write_all();
  ASSERT_EQ(read().verdict, HeadVerdict::kFine);
  EXPECT_EQ(begins_, (std::vector<int64_t>{0, 2, 4, 6}));
  EXPECT_EQ(counts_, std::vector<int64_t>(9, 2));
  std::vector<int32_t> origins(6), experts(12);
  std::vector<float> weights(12), scales(6);
  ASSERT_TRUE(read_rows(fronts_, begins_, {origins, experts, weights, scales, kChoices, kScales}));
  for (size_t sender = 0; sender < kMembers; ++sender) {
    EXPECT_EQ(std::vector<int32_t>(origins.begin() + 2 * sender, origins.begin() + 2 * sender + 2),
              (std::vector<int32_t>{100, 103}));
    EXPECT_EQ(std::vector<int32_t>(experts.begin() + 4 * sender, experts.begin() + 4 * sender + 4),
              (std::vector<int32_t>{0, -1, -1, 0}));
    EXPECT_EQ(weights[4 * sender + 2], 6.5F);
    EXPECT_EQ(scales[2 * sender + 1], 10.0F);
  }
}

TEST_F(Records, HeadsThatLieAreRefused) {
  write_all();
  const auto refused = [&](HeadVerdict verdict, size_t member, const char* what) {
    const HeadCheck found = read();
    EXPECT_EQ(found.verdict, verdict) << what;
    EXPECT_EQ(found.member, member) << what;
    EXPECT_EQ(std::memcmp(&found.head, &head(member), sizeof found.head), 0) << what;
  };
  const RecordHead right = head(2);
  EXPECT_EQ(read(8).verdict, HeadVerdict::kOtherRecord);
  head(2).magic ^= 1;
  refused(HeadVerdict::kOtherRecord, 2, "magic");
  head(2) = right;
  head(2).member = 1;
  refused(HeadVerdict::kOtherRecord, 2, "member");
  head(2) = right;
  head(2).step = 9 + (1ULL << 32);
  refused(HeadVerdict::kOtherRecord, 2, "step");
  head(2) = right;
  head(2).members = 4;
  refused(HeadVerdict::kOtherRecord, 2, "members");
  head(2) = right;
  for (const uint32_t rows : {1U, static_cast<uint32_t>(kMost), static_cast<uint32_t>(kMost) + 1, UINT32_MAX}) {
    head(2).rows = rows;
    refused(HeadVerdict::kTooManyRows, 2, "rows that the counts do not have");
    if (rows <= kMost) continue;
    announced(2, 0) = rows;
    refused(HeadVerdict::kTooManyRows, 2, "more rows than agreed, in both places");
    announced(2, 0) = 2;
  }
  head(2) = right;
  announced(1, 2) = kMost + 1;
  refused(HeadVerdict::kTooManyRows, 1, "rows for another member");
  announced(1, 2) = 2;
  EXPECT_EQ(read().verdict, HeadVerdict::kFine);
}

TEST_F(Records, RowsAreReadWithinFrontsOnly) {
  write_all();
  std::vector<int64_t> few(kMembers * kMembers - 1);
  EXPECT_EQ(read_heads(fronts_, kMembers, 9, kMost, counts_, begins_).verdict, HeadVerdict::kMisuse)
      << "no such reader";
  EXPECT_EQ(read_heads(fronts_, 0, 9, kMost, few, begins_).verdict, HeadVerdict::kMisuse);
  EXPECT_EQ(read_heads(fronts_, 0, 9, kMost, counts_, std::span(begins_).first(kMembers)).verdict,
            HeadVerdict::kMisuse);
  std::vector<int32_t> origins(6, -7), experts(12);
  std::vector<float> weights(12), scales(6);
  const ReadAbout into{origins, experts, weights, scales, kChoices, kScales};
  for (const std::vector<int64_t>& bad : std::vector<std::vector<int64_t>>{
           {}, {0, 2, 4}, {0, 2, 4, 5}, {0, 2, 4, 7}, {0, 4, 2, 6}, {1, 2, 4, 6}, {0, -1, 4, 6}})
    EXPECT_FALSE(read_rows(fronts_, bad, into));
  EXPECT_FALSE(read_rows(fronts_, offsets_, {origins, experts, weights, scales, 1, kScales})) << "other widths";
  EXPECT_FALSE(read_rows(fronts_, offsets_, {origins, experts, weights, scales, kChoices, 2})) << "other widths";
  fronts_[1] = fronts_[1].last(kHeadBytes + 2 * kMetaBytes - 1);
  EXPECT_FALSE(read_rows(fronts_, offsets_, into));
  EXPECT_EQ(origins, std::vector<int32_t>(6, -7));
  fronts_[1] = fronts_[1].last(kHeadBytes - 1);
  EXPECT_EQ(read().verdict, HeadVerdict::kMisuse);
}

}  // namespace
}  // namespace asyncfabric::rows
