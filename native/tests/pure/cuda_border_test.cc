// cuda_border_test.cc: what of the cuda provider needs no GPU: keys from hostile bytes, options, and a clear refusal where there
// is no driver. What needs one is in tests/gpu.
#include <gtest/gtest.h>

#include "providers/cuda/memory.h"
#include "providers/cuda/rail.h"

namespace asyncfabric {
Status open_cuda_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail);
}

namespace asyncfabric::cuda {
namespace {

Passport legacy_passport() {
  Passport passport;
  passport.kind = Export::kLegacy;
  passport.mapped = 1 << 21;
  passport.offset = 4096;
  for (size_t i = 0; i < sizeof passport.legacy.reserved; ++i) passport.legacy.reserved[i] = static_cast<char>(i);
  for (size_t i = 0; i < sizeof passport.device.bytes; ++i)
    passport.device.bytes[i] = static_cast<unsigned char>(200 + i);
  return passport;
}

TEST(CudaPassport, ComesBackAsItWent) {
  const Passport sent = legacy_passport();
  const std::string bytes = encode_passport("local key", sent);
  std::string_view key;
  Passport got;
  ASSERT_TRUE(decode_passport(bytes, &key, &got).ok());
  EXPECT_EQ(key, "local key");
  EXPECT_EQ(got.kind, sent.kind);
  EXPECT_EQ(got.mapped, sent.mapped);
  EXPECT_EQ(got.offset, sent.offset);
  EXPECT_EQ(std::string_view(got.legacy.reserved, 64), std::string_view(sent.legacy.reserved, 64));
  EXPECT_EQ(got.device.bytes[15], sent.device.bytes[15]);
}

Passport chunked_passport(uint64_t chunk, uint64_t chunks) {
  Passport passport;
  passport.kind = Export::kChunks;
  passport.chunk = chunk;
  passport.mapped = chunk * chunks;
  passport.offset = 17;
  return passport;
}

TEST(CudaPassport, StatesHowManyHandlesThereAre) {
  std::string_view key;
  Passport got;
  ASSERT_TRUE(decode_passport(encode_passport("k", chunked_passport(20 << 20, 7)), &key, &got).ok());
  EXPECT_EQ(got.handles(), 7u);
  EXPECT_EQ(got.chunk, 20u << 20);
  EXPECT_EQ(got.offset, 17u);
  EXPECT_EQ(legacy_passport().handles(), 0u);
  EXPECT_EQ(Passport().handles(), 0u);
}

TEST(CudaPassport, ChunksThatDoNotFitAreRefused) {
  std::string_view key;
  Passport got;
  Passport passport = chunked_passport(4096, 3);
  passport.mapped += 1;
  EXPECT_FALSE(decode_passport(encode_passport("k", passport), &key, &got).ok());
  passport.mapped -= 1;
  passport.chunk = 0;
  EXPECT_FALSE(decode_passport(encode_passport("k", passport), &key, &got).ok());
  EXPECT_TRUE(decode_passport(encode_passport("k", chunked_passport(4096, kMostChunks)), &key, &got).ok());
  EXPECT_FALSE(decode_passport(encode_passport("k", chunked_passport(4096, kMostChunks + 1)), &key, &got).ok());
}

TEST(CudaPassport, EveryTruncationAndSurplusIsRefused) {
  for (const Passport& sent : {legacy_passport(), chunked_passport(4096, 2)}) {
    const std::string bytes = encode_passport("local key", sent);
    std::string_view key;
    Passport got;
    for (size_t length = 0; length < bytes.size(); ++length)
      EXPECT_FALSE(decode_passport(std::string_view(bytes).substr(0, length), &key, &got).ok()) << length;
    EXPECT_FALSE(decode_passport(bytes + "x", &key, &got).ok());
  }
}

TEST(CudaPassport, AnOffsetBeyondTheAllocationIsRefused) {
  Passport passport = legacy_passport();
  std::string_view key;
  Passport got;
  passport.offset = passport.mapped;
  EXPECT_FALSE(decode_passport(encode_passport("k", passport), &key, &got).ok());
  passport.mapped = 0;
  EXPECT_FALSE(decode_passport(encode_passport("k", passport), &key, &got).ok());
  passport = legacy_passport();
  passport.mapped = 1ull << 60;
  EXPECT_FALSE(decode_passport(encode_passport("k", passport), &key, &got).ok());
}

TEST(CudaOptions, AreReadOrNamed) {
  Options options;
  std::string detail;
  RailSpec spec{"cuda", "3", {{"lists", "batch"}, {"lanes", "2"}, {"ring", "64"}}};
  ASSERT_TRUE(parse_options(spec, &options, &detail).ok()) << detail;
  EXPECT_EQ(options.device, 3);
  EXPECT_EQ(options.lists, ListMode::kBatch);
  EXPECT_EQ(options.lanes, 2u);
  EXPECT_EQ(options.local.ring_entries, 64u);
  for (const auto& [name, value] : {std::pair{"lists", "magic"}, {"lanes", "9"}, {"ring", "7"}, {"speed", "high"}}) {
    detail.clear();
    EXPECT_FALSE(parse_options({"cuda", "", {{name, value}}}, &options, &detail).ok());
    EXPECT_NE(detail.find(name), std::string::npos) << detail;
  }
  EXPECT_EQ(parse_options({"cuda", "first", {}}, &options, &detail).code, StatusCode::kNoProvider);
}

TEST(CudaRail, StatesWhyItCannotOpen) {
  std::unique_ptr<Rail> rail;
  std::string detail;
  const Status status = open_cuda_rail({"cuda", "4096", {}}, &rail, &detail);
  EXPECT_EQ(status.code, StatusCode::kNoProvider);
  EXPECT_EQ(rail, nullptr);
  EXPECT_NE(detail.find("cuda: "), std::string::npos) << detail;
  EXPECT_GT(detail.size(), 40u) << "a sentence, not a number: " << detail;
}

}  // namespace
}  // namespace asyncfabric::cuda
