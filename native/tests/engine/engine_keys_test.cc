// engine_keys_test.cc: keys by the thousand that are edited, forged, of an earlier life, of another fabric, or revoked, shown by an engine
// that believes every field. No byte and no count lands but where the key that was handed out reaches, and nothing is read.
// ASYNCFABRIC_TEST_KEYS: how many of each kind; 100000 takes a minute on each rail but verbs, where most refusals cost a connection.
#include <dirent.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <random>

#include "engine/wire.h"
#include "providers/local/memory/regions.h"
#include "rigs/engine_pair.h"
#ifdef ASYNCFABRIC_WITH_LIBFABRIC
#include "providers/libfabric/peers/wire.h"
#endif
#ifdef ASYNCFABRIC_WITH_VERBS
#include "providers/verbs/peers/wire.h"
#endif

namespace asyncfabric::testing {
namespace {

constexpr uint64_t kKeyBytes = 16384, kRangeFirst = 4099, kRangeLength = 77;
constexpr uint32_t kKeyImm = 66;

uint64_t keys_of_each_kind() {
  const char* text = std::getenv("ASYNCFABRIC_TEST_KEYS");
  return text == nullptr ? 500 : std::strtoull(text, nullptr, 10);
}

// The last of the machine's RDMA devices, which reaches itself.
std::string rdma_device() {
  std::string last;
  DIR* directory = opendir("/sys/class/infiniband");
  if (directory == nullptr) return last;
  while (const dirent* entry = readdir(directory))
    if (entry->d_name[0] != '.') last = std::max(last, std::string(entry->d_name));
  closedir(directory);
  return last;
}

// A key of this form with the number, and whatever else of it the owner could look at, drawn anew.
std::string forged(const std::string& rail, const std::string& bytes, std::mt19937_64& random) {
  if (rail == "local") {
    local::RegionKey key;
    EXPECT_TRUE(local::decode_key(bytes, &key).ok());
    key.word = random();
    if (random() % 2 == 0) key.slot = static_cast<uint32_t>(random() % 8);
    return local::encode_key(key);
  }
#ifdef ASYNCFABRIC_WITH_LIBFABRIC
  if (rail == "tcp") {
    libfabric::MemoryKey key;
    EXPECT_TRUE(libfabric::parse(bytes, &key));
    key.key = random() % 2 == 0 ? random() : random() % 64;
    key.access = kAccessRemoteRead | kAccessRemoteWrite;
    key.first = 0;
    key.length = kKeyBytes;
    return encode(key);
  }
#endif
#ifdef ASYNCFABRIC_WITH_VERBS
  if (rail == "verbs") {
    verbs::MemoryKey key;
    EXPECT_TRUE(verbs::parse(bytes, &key));
    // The lowest byte is what the device draws; the index in front of it can be guessed, and the base is no secret from who has a key.
    key.rkey =
        random() % 2 == 0 ? static_cast<uint32_t>(random()) : key.rkey ^ (1u + static_cast<uint32_t>(random() % 255));
    key.access = kAccessRemoteRead | kAccessRemoteWrite;
    return encode(key);
  }
#endif
  return bytes;
}

// A key of this form that claims to be one of `owner`'s: the number is that of `bytes`.
std::string disguised(const std::string& rail, const std::string& bytes, const std::string& owner) {
#ifdef ASYNCFABRIC_WITH_VERBS
  if (rail == "verbs") {
    verbs::MemoryKey key, real;
    EXPECT_TRUE(verbs::parse(bytes, &key) && verbs::parse(owner, &real));
    key.incarnation = real.incarnation;
    key.life = real.life;
    return encode(key);
  }
#endif
  return bytes;
}

class EngineKeys : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    RailSpec spec{GetParam(), "", {}};
    // Within one process a local rail copies directly, so that one goes through the owner here, as where the kernel refuses to copy.
    if (rail() == "local") spec.options = {{"foreign", "bounce"}};
    if (rail() == "verbs" && (spec.device = rdma_device()).empty())
      GTEST_SKIP() << "NO RDMA DEVICE HERE: verbs is tested by `make rxe`, in a VM with soft-RoCE";
    {
      Pair earlier(Pair::manual(spec));  // its keys are of a life that is over
      std::vector<uint8_t> gone(kKeyBytes);
      earlier_key_ = key_of(*earlier.b, earlier.add_region(*earlier.b, gone), false);
    }
    pair_ = std::make_unique<Pair>(Pair::manual(spec));
    others_ = std::make_unique<Pair>(Pair::manual(spec));
    source_ = pair_->add_region(*pair_->a, from_);
    target_ = pair_->add_region(*pair_->b, to_);
    foreign_key_ = key_of(*others_->b, others_->add_region(*others_->b, foreign_), false);
    counter_ = pair_->open_counter(*pair_->b, kKeyImm);
    strict_ = key_of(*pair_->b, target_, true);
    whole_ = key_of(*pair_->b, target_, false);
  }

  std::string rail() const { return GetParam(); }

  static KeyBlob key_of(Party& owner, RegionId region, bool strict) {
    std::string bytes;
    const uint32_t access = strict ? kAccessRemoteWrite : kAccessRemoteWrite | kAccessRemoteRead;
    const uint64_t offset = strict ? kRangeFirst : 0, length = strict ? kRangeLength : kKeyBytes;
    EXPECT_TRUE(owner.engine->region_key(region, access, offset, length, strict, &bytes).ok());
    KeyBlob blob;
    EXPECT_TRUE(decode_key(bytes, &blob));
    return blob;
  }

  // A key of ours whose rails' keys are those of another one.
  KeyBlob with_rail_keys(const KeyBlob& from) {
    KeyBlob blob = whole_;
    for (size_t i = 0; i < blob.rail_keys.size(); ++i)
      blob.rail_keys[i] = disguised(rail(), from.rail_keys[i], whole_.rail_keys[i]);
    return blob;
  }

  Status attempt(const KeyBlob& blob, bool reads, uint64_t at, uint64_t length) {
    KeyId opened = 0;
    KeyInfo info;
    Party& a = *pair_->a;
    if (const Status status = a.engine->open_key(encode_key(blob), &opened, &info); !status.ok()) return status;
    const uint64_t cookie = a.cookie();
    OpId op = 0;
    Status status = reads ? a.engine->submit_read(cookie, source_, 0, length, opened, at, &op)
                          : a.engine->submit_write(cookie, source_, 0, length, opened, at, kKeyImm, &op, 0);
    if (status.ok()) status = pair_->wait(a, cookie).status;
    a.done.clear();
    a.engine->close_key(opened);
    return status;
  }

  static bool is(const std::vector<uint8_t>& bytes, uint8_t value) {
    return std::all_of(bytes.begin(), bytes.end(), [value](uint8_t x) { return x == value; });
  }

  // Tries so many keys of `next`; `inside`: writes within the strict range may land.
  void try_all(bool inside, const std::function<KeyBlob(std::mt19937_64&)>& next) {
    std::mt19937_64 random(std::random_device{}());
    const auto look = [&] {
      for (uint64_t i = 0; i < kKeyBytes; ++i)
        ASSERT_TRUE(to_[i] == 0xee || (inside && i >= kRangeFirst && i < kRangeFirst + kRangeLength))
            << "a byte landed at " << i;
      ASSERT_TRUE(is(from_, 0x11)) << "something was read";
      ASSERT_TRUE(is(foreign_, 0x33));
    };
    uint64_t landed = 0;
    const uint64_t count = keys_of_each_kind();
    for (uint64_t round = 0; round < count; ++round) {
      const KeyBlob blob = next(random);
      const uint64_t length = 1 + random() % 200;
      const bool near = random() % 2 == 0 && blob.offset <= kRangeFirst;
      const uint64_t at = near ? kRangeFirst - blob.offset + random() % kRangeLength : random() % kKeyBytes;
      const bool reads = round % 4 == 3;
      const Status status = attempt(blob, reads, at, length);
      ASSERT_TRUE((inside && !reads) || !status.ok()) << "round " << round;
      landed += status.ok() ? 1 : 0;
      if (round % 64 == 0) look();
      if (HasFatalFailure()) return;
    }
    look();
    ASSERT_TRUE(attempt(strict_or_fresh(), false, 0, kRangeLength).ok()) << "what was handed out does what it allows";
    ASSERT_TRUE(pair_->until([&] { return pair_->b->engine->counter_value(counter_) >= landed + 1; }));
    EXPECT_EQ(pair_->b->engine->counter_value(counter_), landed + 1) << "a refused write counted";
    if (inside) { EXPECT_GT(landed, 0u); }
  }

  KeyBlob strict_or_fresh() { return key_of(*pair_->b, target_, true); }

  void revoke() {
    const uint64_t cookie = pair_->b->cookie();
    ASSERT_TRUE(pair_->b->engine->submit_revoke(cookie, target_).ok());
    ASSERT_TRUE(pair_->wait(*pair_->b, cookie).status.ok());
  }

  std::unique_ptr<Pair> pair_, others_;
  std::vector<uint8_t> from_ = std::vector<uint8_t>(kKeyBytes, 0x11), to_ = std::vector<uint8_t>(kKeyBytes, 0xee);
  std::vector<uint8_t> foreign_ = std::vector<uint8_t>(kKeyBytes, 0x33);
  RegionId source_ = 0, target_ = 0;
  CounterId counter_ = 0;
  KeyBlob strict_, whole_, earlier_key_, foreign_key_;
};

TEST_P(EngineKeys, EditedOnesReachTheirRangeAndNoFurther) {
  try_all(true, [&](std::mt19937_64& random) {
    KeyBlob blob = strict_;
    blob.access = kAccessRemoteWrite | kAccessRemoteRead;
    blob.offset = random() % 4 == 0 ? random() % kKeyBytes : 0;
    blob.length = random() % 8 == 0 ? random() : kKeyBytes - std::min(blob.offset, kKeyBytes - 1);
    if (random() % 16 == 0) blob.generation ^= 1ull << random() % 64;
    if (random() % 16 == 0) blob.region ^= 1ull << random() % 64;
    if (random() % 4 == 0) {
      std::string& bytes = blob.rail_keys[0];
      for (uint64_t edits = 1 + random() % 3; edits != 0; --edits)
        bytes[random() % bytes.size()] ^= static_cast<char>(1 << random() % 8);
    }
    return blob;
  });
}

TEST_P(EngineKeys, ForgedOnesOpenNothing) {
  try_all(false, [&](std::mt19937_64& random) {
    KeyBlob blob = whole_;
    for (std::string& bytes : blob.rail_keys) bytes = forged(rail(), bytes, random);
    return blob;
  });
}

TEST_P(EngineKeys, ThoseOfAnEarlierLifeOpenNothing) {
  try_all(false, [&](std::mt19937_64& random) {
    return random() % 8 == 0 ? earlier_key_ : with_rail_keys(earlier_key_);  // as it was, or as if of this life
  });
}

TEST_P(EngineKeys, ThoseOfAnotherFabricOpenNothingHere) {
  try_all(false, [&](std::mt19937_64&) { return with_rail_keys(foreign_key_); });
}

TEST_P(EngineKeys, RevokedOnesOpenNothing) {
  const KeyBlob dead[] = {whole_, strict_};
  revoke();
  const KeyBlob fresh = key_of(*pair_->b, target_, false);
  try_all(false, [&](std::mt19937_64& random) {
    KeyBlob blob = dead[random() % 2];
    if (random() % 8 != 0) blob.generation = fresh.generation;  // as if it were good
    if (random() % 2 == 0) blob.length = kKeyBytes;
    return blob;
  });
}

INSTANTIATE_TEST_SUITE_P(Rails, EngineKeys, ::testing::Values("local", "tcp", "verbs"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace asyncfabric::testing
