// libfabric_rights_test.cc: what the holder of a key reaches who edits it: the target's library looks at the registration behind the number,
// and each set of rights and each strict range has one of its own, under a random number.
#include <algorithm>
#include <cstring>
#include <random>
#include <set>

#include "libfabric_pair.h"
#include "providers/libfabric/peers/wire.h"

namespace asyncfabric::testing {
namespace {

using libfabric::MemoryKey;

constexpr size_t kBytes = 1 << 16;

class LibfabricRights : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (const std::string why = missing(spec()); !why.empty()) GTEST_SKIP() << why;
  }
  static RailSpec spec() { return spec_of(GetParam()); }
};

MemoryKey parsed(const std::string& bytes) {
  MemoryKey key;
  EXPECT_TRUE(libfabric::parse(bytes, &key));
  return key;
}

std::string narrow(Side& owner, const KeyScope& scope) {
  std::string key;
  const Status status = owner.rail->narrow_key(*owner.memory, scope, &key);
  EXPECT_TRUE(status.ok()) << status_text(status.code);
  return key;
}

// How one request under a key ended.
Status attempt(Side& a, Side& b, Link& link, const std::string& key, WorkRequest request) {
  EXPECT_TRUE(a.rail->attach(*link.peer, key, kPatience, &link.remote).ok());
  if (request.length != 0) request.remote = link.remote.get();
  link.post(request, {&a, &b});
  const auto ended = [&] { return !a.done.empty() && a.done.back().first == request.tag; };
  EXPECT_TRUE(pump_until({&a, &b}, ended)) << "it hangs";
  return a.done.back().second;
}

bool is(const std::vector<uint8_t>& bytes, uint8_t value) {
  return std::all_of(bytes.begin(), bytes.end(), [value](uint8_t x) { return x == value; });
}

TEST_P(LibfabricRights, AReadKeyWritesNothingHoweverItIsEdited) {
  Side a(spec(), kBytes), b(spec(), kBytes);
  Link link(a, b);
  std::fill(b.region.begin(), b.region.end(), 0xee);
  const std::string reader = narrow(b, {kAccessRemoteRead, 0, kBytes, false});
  EXPECT_EQ(reader, narrow(b, {kAccessRemoteRead, 16, 16, false})) << "one registration for one right";
  MemoryKey edited = parsed(reader);
  EXPECT_NE(edited.key, parsed(b.key).key);
  edited.access = kAccessRemoteRead | kAccessRemoteWrite;
  uint64_t tag = 0;
  for (const uint64_t length : {uint64_t{1}, uint64_t{64}, uint64_t{20000}}) {
    EXPECT_FALSE(attempt(a, b, link, encode(edited), link.write_imm(0, 0, length, ++tag, 66)).ok()) << length;
    EXPECT_TRUE(attempt(a, b, link, encode(edited), link.signal(++tag, 7)).ok()) << "the link goes on";
  }
  EXPECT_TRUE(is(b.region, 0xee));
  EXPECT_EQ(std::count(b.imms.begin(), b.imms.end(), 66u), 0);
  WorkRequest read = link.write_imm(0, 0, 64, ++tag, 0);
  read.kind = WorkKind::kRead;
  read.has_imm = false;
  EXPECT_TRUE(attempt(a, b, link, reader, read).ok()) << "what it states it does";
  EXPECT_EQ(a.region[63], 0xee);
}

TEST_P(LibfabricRights, AWriteKeyReadsNothingHoweverItIsEdited) {
  if (spec().provider != "tcp" || !spec().options.empty())
    GTEST_SKIP() << "ofi_rxm adds the right to read to each registration: rxm_mr_get_msg_access() of libfabric";
  Side a(spec(), kBytes), b(spec(), kBytes);
  Link link(a, b);
  std::fill(a.region.begin(), a.region.end(), 0x11);
  std::fill(b.region.begin(), b.region.end(), 0xee);
  const std::string writer = narrow(b, {kAccessRemoteWrite, 0, kBytes, false});
  MemoryKey edited = parsed(writer);
  edited.access = kAccessRemoteRead | kAccessRemoteWrite;
  WorkRequest read = link.write_imm(0, 0, 64, 1, 0);
  read.kind = WorkKind::kRead;
  read.has_imm = false;
  EXPECT_FALSE(attempt(a, b, link, encode(edited), read).ok());
  EXPECT_TRUE(is(a.region, 0x11));
  EXPECT_TRUE(attempt(a, b, link, writer, link.write_imm(0, 0, 64, 2, 5)).ok());
  EXPECT_EQ(b.region[63], 0x11);
}

TEST_P(LibfabricRights, AStrictKeyReachesItsRange) {
  Side a(spec(), kBytes), b(spec(), kBytes);
  Link link(a, b);
  std::fill(a.region.begin(), a.region.end(), 0x11);
  std::fill(b.region.begin(), b.region.end(), 0xee);
  const KeyScope scope{kAccessRemoteWrite, 4099, 77, true};
  const std::string strict = narrow(b, scope);
  EXPECT_EQ(strict, narrow(b, scope));
  uint64_t tag = 0;
  EXPECT_TRUE(attempt(a, b, link, strict, link.write_imm(0, 4099, 77, ++tag, 5)).ok());
  MemoryKey wide = parsed(strict);
  wide.base -= wide.base >= wide.first ? wide.first : 0;
  wide.first = 0;
  wide.length = kBytes;
  struct Try {
    uint64_t at, length;
  };
  const Try outside[] = {{4098, 1}, {4098, 2}, {4176, 1}, {4175, 2}, {4000, 300}, {8192, 8}};
  for (const bool by_first : {false, true})
    for (const Try& each : outside) {
      MemoryKey edited = wide;
      if (by_first) {  // as if the range began elsewhere
        edited = parsed(strict);
        edited.length = kBytes - edited.first;
        if (each.at < edited.first) continue;
      } else if (wide.base == 0) {  // offsets count from the range's own first byte there
        continue;
      }
      EXPECT_FALSE(attempt(a, b, link, encode(edited), link.write_imm(0, each.at, each.length, ++tag, 66)).ok())
          << each.at << " " << each.length;
    }
  for (size_t i = 0; i < kBytes; ++i) {
    const bool inside = i >= scope.offset && i < scope.offset + scope.length;
    ASSERT_EQ(b.region[i], inside ? 0x11 : 0xee) << i;
  }
  EXPECT_EQ(std::count(b.imms.begin(), b.imms.end(), 66u), 0);
}

// What cannot be read is refused here; of what can, so many are tried.
TEST_P(LibfabricRights, RandomEditsWriteNothing) {
  constexpr int kEdits = 100'000;
  const uint64_t most =
      spec().options.empty() && spec().provider == "tcp" ? 2000 : 60;  // elsewhere each costs a connection
  Side a(spec(), kBytes), b(spec(), kBytes);
  Link link(a, b);
  std::fill(b.region.begin(), b.region.end(), 0xee);
  const std::string reader = narrow(b, {kAccessRemoteRead, 0, kBytes, false});
  std::mt19937_64 random(41);
  uint64_t tried = 0;
  for (int round = 0; round < kEdits; ++round) {
    std::string bytes = reader;
    for (uint64_t edits = 1 + random() % 3; edits != 0; --edits)
      bytes[random() % bytes.size()] ^= static_cast<char>(1 << random() % 8);
    MemoryKey key;
    if (!libfabric::parse(bytes, &key)) {
      std::unique_ptr<RemoteMemory> none;
      ASSERT_FALSE(a.rail->attach(*link.peer, bytes, kPatience, &none).ok());
      continue;
    }
    if (key.provider != parsed(reader).provider || tried == most) continue;
    key.access |= kAccessRemoteWrite;
    key.length = std::max<uint64_t>(key.length, kBytes) >> (key.length > kBytes ? 16 : 0);
    if (key.length < 64 || key.first + key.length < key.first || key.base + key.length < key.base) continue;
    ++tried;
    ASSERT_FALSE(attempt(a, b, link, encode(key), link.write_imm(0, key.first, 64, tried, 66)).ok());
  }
  EXPECT_EQ(tried, most);
  EXPECT_TRUE(is(b.region, 0xee));
  EXPECT_EQ(std::count(b.imms.begin(), b.imms.end(), 66u), 0);
}

// All of them end with the key of all rights.
TEST_P(LibfabricRights, RevokingEndsTheNarrowerKeys) {
  Side a(spec(), kBytes), b(spec(), kBytes);
  std::fill(b.region.begin(), b.region.end(), 0xee);
  const std::string writer = narrow(b, {kAccessRemoteWrite, 0, kBytes, false});
  const std::string strict = narrow(b, {kAccessRemoteWrite, 8, 64, true});
  std::string fresh;
  ASSERT_TRUE(b.rail->revoke_memory(*b.memory, kPatience, &fresh).ok());
  EXPECT_NE(narrow(b, {kAccessRemoteWrite, 0, kBytes, false}), writer);
  Link link(a, b);
  EXPECT_FALSE(attempt(a, b, link, writer, link.write_imm(0, 0, 64, 1, 66)).ok());
  EXPECT_FALSE(attempt(a, b, link, strict, link.write_imm(0, 8, 64, 2, 66)).ok());
  EXPECT_TRUE(is(b.region, 0xee));
}

// Nobody finds the key of other memory by counting.
TEST(LibfabricRightsNumbers, KeysAreRandom) {
  Side side(spec_of("tcp"), kBytes);
  std::set<uint64_t> high;
  for (uint64_t i = 0; i < 64; ++i) high.insert(parsed(narrow(side, {kAccessRemoteRead, i, 1, true})).key >> 32);
  EXPECT_GT(high.size(), 60u);
}

INSTANTIATE_TEST_SUITE_P(Profiles, LibfabricRights, kProfiles,
                         [](const auto& info) { return name_of_profile(info.param); });

}  // namespace
}  // namespace asyncfabric::testing
