// engine_rights_test.cc: keys that somebody edits and seals again, shown by an engine that believes them: what the owner's rails were not
// asked for does not land, whatever the fields state. The range of a key that is not strict is its user's business, see trust.md.
#include <algorithm>
#include <random>

#include "engine/wire.h"
#include "rigs/engine_pair.h"

namespace asyncfabric::testing {
namespace {

constexpr uint64_t kBytes = 16384;

// Within one process a local rail copies directly, so that one goes through the owner here, as where the kernel refuses to copy.
class EngineRights : public ::testing::TestWithParam<const char*> {
 protected:
  static RailSpec rail() {
    if (GetParam() == std::string("local")) return {"local", "", {{"foreign", "bounce"}}};
    return {GetParam(), "", {}};
  }

  EngineRights() : pair_(Pair::manual(rail())), from_(kBytes, 0x11), to_(kBytes, 0xee) {
    source_ = pair_.add_region(*pair_.a, from_);
    target_ = pair_.add_region(*pair_.b, to_);
  }

  KeyBlob key(uint32_t access, uint64_t offset, uint64_t length, bool strict) {
    std::string bytes;
    EXPECT_TRUE(pair_.b->engine->region_key(target_, access, offset, length, strict, &bytes).ok());
    KeyBlob blob;
    EXPECT_TRUE(decode_key(bytes, &blob));
    return blob;
  }

  Status write(const KeyBlob& blob, uint64_t offset, uint64_t length) {
    KeyId opened = 0;
    KeyInfo info;
    if (const Status status = pair_.a->engine->open_key(encode_key(blob), &opened, &info); !status.ok()) return status;
    const uint64_t cookie = pair_.a->cookie();
    OpId op = 0;
    Status status = pair_.a->engine->submit_write(cookie, source_, 0, length, opened, offset, kNoImm, &op, 0);
    if (status.ok()) status = pair_.wait(*pair_.a, cookie).status;
    pair_.a->engine->close_key(opened);
    return status;
  }

  Pair pair_;
  std::vector<uint8_t> from_, to_;
  RegionId source_ = 0, target_ = 0;
};

TEST_P(EngineRights, AnEditedReadKeyWritesNothing) {
  KeyBlob blob = key(kAccessRemoteRead, 0, kBytes, false);
  blob.access = kAccessRemoteRead | kAccessRemoteWrite;
  for (const uint64_t length : {1, 64, 5000}) EXPECT_FALSE(write(blob, 8, length).ok());
  EXPECT_TRUE(std::all_of(to_.begin(), to_.end(), [](uint8_t x) { return x == 0xee; }));
  EXPECT_TRUE(write(key(kAccessRemoteWrite, 0, kBytes, false), 8, 64).ok());
}

TEST_P(EngineRights, AnEditedStrictKeyStaysInItsRange) {
  constexpr uint64_t kFirst = 4099, kLength = 77;
  const KeyBlob strict = key(kAccessRemoteWrite, kFirst, kLength, true);
  EXPECT_TRUE(write(strict, 0, kLength).ok());
  std::mt19937_64 random(51);
  for (int round = 0; round < 300; ++round) {
    KeyBlob blob = strict;
    blob.offset = random() % 2 == 0 ? 0 : kFirst - random() % 64;
    blob.length = kBytes - blob.offset;
    blob.access = kAccessRemoteWrite | (random() % 4 == 0 ? kAccessRemoteRead : 0u);
    const uint64_t length = 1 + random() % 200;
    const uint64_t at =
        random() % 2 == 0 ? random() % (blob.length - length) : kFirst - blob.offset - 1 + random() % 80;
    const uint64_t lands = blob.offset + at;
    const bool inside = lands >= kFirst && lands + length <= kFirst + kLength;
    if (at + length > blob.length) continue;
    EXPECT_EQ(write(blob, at, length).ok(), inside) << lands << " " << length;
  }
  for (uint64_t i = 0; i < kBytes; ++i) {
    const bool inside = i >= kFirst && i < kFirst + kLength;
    ASSERT_EQ(to_[i], inside ? 0x11 : 0xee) << i;
  }
}

TEST_P(EngineRights, KeysOfEachScopeEndWithARevocation) {
  const KeyBlob dead[] = {key(kAccessRemoteWrite, 0, kBytes, false), key(kAccessRemoteWrite, 8, 64, true)};
  const uint64_t cookie = pair_.b->cookie();
  ASSERT_TRUE(pair_.b->engine->submit_revoke(cookie, target_).ok());
  ASSERT_TRUE(pair_.wait(*pair_.b, cookie).status.ok());
  for (KeyBlob blob : dead) {
    EXPECT_FALSE(write(blob, 0, 64).ok());
    blob.generation += 1;  // as the engine of the owner expects them now
    EXPECT_FALSE(write(blob, 0, 64).ok());
  }
  EXPECT_TRUE(std::all_of(to_.begin(), to_.end(), [](uint8_t x) { return x == 0xee; }));
  EXPECT_TRUE(write(key(kAccessRemoteWrite, 8, 64, true), 0, 64).ok());
}

INSTANTIATE_TEST_SUITE_P(Rails, EngineRights, ::testing::Values("local", "tcp"));

}  // namespace
}  // namespace asyncfabric::testing
