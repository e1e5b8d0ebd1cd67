// local_keys_test.cc: INV-3 under load: after a revoke returns, no write under the old key touches the memory,
// whichever way bytes move. And keys and addresses made of hostile bytes.
#include <atomic>
#include <fstream>
#include <string>
#include <thread>

#include "local_rig.h"
#include "providers/local/memory/regions.h"
#include "providers/local/peers/identity.h"
#include "providers/local/peers/outgoing.h"

namespace asyncfabric {
namespace {

using namespace local_rig;

struct RevokedWay {
  const char* name;
  const char* foreign;
  Kind kind;
};

class LocalRevoke : public ::testing::TestWithParam<RevokedWay> {};

// The writer floods the region; the owner revokes, repaints the memory and looks again when the writer has noticed.
TEST_P(LocalRevoke, NothingLandsAfterRevokeReturned) {
  constexpr uint64_t kBytes = 1 << 20;
  Endpoint writer(Words{{"foreign", GetParam().foreign}});
  Endpoint owner(Words{{"foreign", GetParam().foreign}});
  Block source(kBytes);
  Block target(kBytes, GetParam().kind);
  source.fill(0xee);
  std::string key = target.enrol(owner);
  auto peer = writer.connect(owner);
  const bool bounces = std::string(GetParam().foreign) == "bounce";

  for (int round = 0; round < 15; ++round) {
    auto remote = attach(writer, *peer, key);
    std::atomic<uint32_t> written{0};
    std::atomic<bool> refused{false};
    std::thread flood([&] {
      const uint64_t first = static_cast<uint64_t>(round) << 32;  // stragglers of earlier rounds do not count
      uint64_t tag = first;
      RailEvent events[16];
      while (!refused) {
        const auto request = transfer(WorkKind::kWrite, *peer, *remote, source.data(), 0, kBytes, ++tag);
        writer.rail->post({&request, 1});
        const size_t count = writer.rail->poll(events);
        for (size_t i = 0; i < count; ++i) {
          if (events[i].tag < first) continue;
          if (events[i].status.ok()) ++written;
          if (events[i].status.code == StatusCode::kStaleKey) refused = true;
        }
      }
    });
    // Bounced bytes are copied by the owner's own poll, which goes on while the control thread revokes.
    std::thread engine([&] {
      while (bounces && !refused) owner.poll();
    });
    while (written < 2) sched_yield();
    EXPECT_TRUE(owner.rail->revoke_memory(*target.handle, kPatienceNs, &key).ok());
    target.fill(0x5a);
    flood.join();
    engine.join();
    for (uint64_t i = 0; i < kBytes; i += 509)
      ASSERT_EQ(target.data()[i], 0x5a) << "a write under a dead key landed at " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, LocalRevoke,
                         ::testing::Values(RevokedWay{"direct", "auto", Kind::kForeign},
                                           RevokedWay{"mapped", "cma", Kind::kMemfd},
                                           RevokedWay{"kernelCopy", "cma", Kind::kForeign},
                                           RevokedWay{"bounce", "bounce", Kind::kForeign}),
                         [](const auto& info) { return info.param.name; });

TEST(LocalRevokeDrain, AStuckWriterMakesItTimeOutAndNotWrong) {
  Endpoint owner;
  Endpoint writer;
  Block target(4096);
  const std::string key = target.enrol(owner);
  auto peer = writer.connect(owner);
  local::RegionKey parsed;
  ASSERT_TRUE(local::decode_key(key, &parsed).ok());
  // The writer "stops" within a copy: its hazard stays up. Planted through the connection's segment.
  auto& hazard = static_cast<local::PeerHandle&>(*peer).link->ring.header().active_slot;
  hazard.store(parsed.slot + 1);
  std::string fresh;
  EXPECT_EQ(owner.rail->revoke_memory(*target.handle, 20'000'000, &fresh).code, StatusCode::kDrainTimeout);
  EXPECT_EQ(owner.rail->release_memory(target.handle, 20'000'000).code, StatusCode::kDrainTimeout);
  ASSERT_NE(target.handle, nullptr) << "the region is kept pinned";
  std::unique_ptr<RemoteMemory> remote;
  EXPECT_EQ(writer.rail->attach(*peer, key, kPatienceNs, &remote).code, StatusCode::kStaleKey) << "nothing new begins";
  hazard.store(0);
  EXPECT_TRUE(owner.rail->revoke_memory(*target.handle, kPatienceNs, &fresh).ok());
  EXPECT_NE(attach(writer, *peer, fresh), nullptr);
  EXPECT_TRUE(owner.rail->release_memory(target.handle, kPatienceNs).ok());
}

TEST(LocalKeys, SlotsAreReusedButKeysAreNot) {
  Endpoint owner;
  Endpoint writer;
  auto peer = writer.connect(owner);
  std::vector<std::string> old;
  for (int round = 0; round < 50; ++round) {
    Block block(4096);
    const std::string key = block.enrol(owner);
    for (const std::string& dead : old) ASSERT_NE(dead, key);
    auto remote = attach(writer, *peer, key);
    ASSERT_TRUE(owner.rail->release_memory(block.handle, kPatienceNs).ok());
    old.push_back(key);
  }
  std::unique_ptr<RemoteMemory> remote;
  for (const std::string& dead : old)
    EXPECT_EQ(writer.rail->attach(*peer, dead, kPatienceNs, &remote).code, StatusCode::kStaleKey);
}

// Who keeps a mapping of a registration knows by them whether it is still the one that a key is of.
TEST(LocalKeys, LivesDistinguishRegistrations) {
  Endpoint owner;
  Endpoint writer;
  auto peer = writer.connect(owner);
  const auto& link = *static_cast<local::PeerHandle&>(*peer).link;
  std::vector<uint64_t> seen;
  for (int round = 0; round < 3; ++round) {
    Block block(4096);
    std::string key = block.enrol(owner);
    const auto first = attach(writer, *peer, key);
    const auto& remote = static_cast<const local::RemoteHandle&>(*first);
    for (const uint64_t before : seen) EXPECT_NE(before, remote.life) << "of an earlier registration of the slot";
    ASSERT_TRUE(owner.rail->revoke_memory(*block.handle, kPatienceNs, &key).ok());
    const auto second = attach(writer, *peer, key);
    EXPECT_EQ(static_cast<const local::RemoteHandle&>(*second).life, remote.life) << "a new key of the same memory";
    ASSERT_TRUE(owner.rail->release_memory(block.handle, kPatienceNs).ok());
    EXPECT_EQ(link.board().slots[remote.slot].life.load(), 0u) << "its end is seen";
    seen.push_back(remote.life);
  }
}

// How often this process has mapped such a file, by the kernel's list.
size_t mappings_of(const std::string& name) {
  std::ifstream maps("/proc/self/maps");
  size_t found = 0;
  for (std::string line; std::getline(maps, line);) found += line.find("/memfd:" + name + " ") != std::string::npos;
  return found;
}

// A new key of the same registration finds the mapping of the one before; the end of the registration ends it, also where nobody calls.
TEST(LocalKeys, AMappingOutlivesItsKeyAndNotItsRegistration) {
  Endpoint writer(Words{{"foreign", "cma"}});
  Endpoint owner;
  Block source(4096), target(1 << 20, Kind::kMemfd);
  const size_t before = mappings_of("block");
  std::string key = target.enrol(owner);
  auto peer = writer.connect(owner);
  const uint8_t* mapped = nullptr;
  for (uint64_t version = 1; version <= 3; ++version) {
    auto remote = attach(writer, *peer, key);
    const uint8_t* direct = static_cast<local::RemoteHandle&>(*remote).direct;
    EXPECT_TRUE(mapped == nullptr || direct == mapped);
    mapped = direct;
    source.fill(static_cast<uint8_t>(version));
    writer.post({transfer(WorkKind::kWrite, *peer, *remote, source.data(), 4096, 4096, version)});
    ASSERT_TRUE(eventually({&writer, &owner}, [&] { return writer.done.contains(version); }));
    EXPECT_TRUE(writer.done[version].ok());
    EXPECT_EQ(target.data()[8191], version);
    ASSERT_TRUE(owner.rail->revoke_memory(*target.handle, kPatienceNs, &key).ok());
    writer.post({transfer(WorkKind::kWrite, *peer, *remote, source.data(), 0, 4096, 100 + version)});
    ASSERT_TRUE(eventually({&writer, &owner}, [&] { return writer.done.contains(100 + version); }));
    EXPECT_EQ(writer.done[100 + version].code, StatusCode::kStaleKey) << "a mapping lets nobody in";
    remote.reset();
    EXPECT_EQ(mappings_of("block"), before + 1) << "the mapping went with its key";
  }
  ASSERT_TRUE(owner.rail->release_memory(target.handle, kPatienceNs).ok());
  EXPECT_TRUE(eventually({&writer, &owner}, [&] { return mappings_of("block") == before; }));
  // Another registration in the same slot is another mapping.
  key = target.enrol(owner);
  auto remote = attach(writer, *peer, key);
  EXPECT_EQ(mappings_of("block"), before + 1);
  peer.reset();
  remote.reset();
  EXPECT_TRUE(eventually({&writer, &owner}, [&] { return mappings_of("block") == before; })) << "the peer is gone";
}

// The engine asks for the range that a key states, and a peer may state what it likes.
TEST(LocalKeys, OnlyWritableMemoryIsMappedAndOnlyWithinItsBounds) {
  constexpr uint64_t kLength = 1 << 20;
  Endpoint writer(Words{{"foreign", "cma"}});
  Endpoint owner;
  Block target(kLength, Kind::kMemfd), readable(kLength, Kind::kMemfd), foreign(kLength, Kind::kForeign);
  auto peer = writer.connect(owner);
  auto remote = attach(writer, *peer, target.enrol(owner));
  std::shared_ptr<uint8_t> mapped = remote->mapped(4096, kLength - 4096);
  ASSERT_NE(mapped, nullptr);
  for (const auto& [offset, length] : std::vector<std::pair<uint64_t, uint64_t>>{
           {4096, kLength - 4095}, {kLength + 1, 0}, {0, kLength + 1}, {~0ull, 2}, {2, ~0ull}})
    EXPECT_EQ(remote->mapped(offset, length), nullptr) << offset << " " << length;
  EXPECT_EQ(attach(writer, *peer, readable.enrol(owner, kAccessRemoteRead))->mapped(0, 1), nullptr);
  EXPECT_EQ(attach(writer, *peer, foreign.enrol(owner))->mapped(0, 1), nullptr);
  remote.reset();
  peer.reset();
  *mapped = 7;  // held: the mapping is there
  EXPECT_EQ(target.data()[4096], 7);
}

TEST(LocalKeys, HostileBytesAreRefused) {
  Endpoint owner;
  Endpoint writer(Words{{"foreign", "cma"}});
  Block target(4096, Kind::kMemfd);
  const std::string key = target.enrol(owner);
  auto peer = writer.connect(owner);
  std::mt19937_64 random(11);
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes = key;
    if (round % 2 == 0) {
      bytes.resize(random() % 128);
      for (char& c : bytes) c = static_cast<char>(random());
    } else {
      bytes[random() % bytes.size()] ^= static_cast<char>(1 << random() % 8);
    }
    std::unique_ptr<RemoteMemory> remote;
    const StatusCode code = writer.rail->attach(*peer, bytes, kPatienceNs, &remote).code;
    ASSERT_TRUE(code == StatusCode::kInvalidArgument || code == StatusCode::kStaleKey) << status_text(code);
    ASSERT_EQ(remote, nullptr);
  }
  EXPECT_NE(attach(writer, *peer, key), nullptr);
}

TEST(LocalAddress, HostileBytesAreRefused) {
  Endpoint owner;
  Endpoint writer;
  const std::string address = owner.rail->address();
  EXPECT_LE(address.size(), 512u);
  std::mt19937_64 random(12);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes = address;
    if (round % 2 == 0) {
      bytes.resize(random() % 300);
      for (char& c : bytes) c = static_cast<char>(random());
    } else {
      bytes[random() % bytes.size()] ^= static_cast<char>(1 << random() % 8);
    }
    std::unique_ptr<RailPeer> peer;
    ASSERT_FALSE(writer.rail->connect(bytes, 1'000'000'000, &peer).ok()) << round;
    ASSERT_EQ(peer, nullptr);
  }
  EXPECT_NE(writer.connect(owner), nullptr);
}

TEST(LocalAddress, AnotherHostIsUnsupported) {
  Endpoint endpoint;
  local::RailAddress address;
  ASSERT_TRUE(local::decode_address(endpoint.rail->address(), &address).ok());
  address.host.low ^= 1;
  std::unique_ptr<RailPeer> peer;
  EXPECT_EQ(endpoint.rail->connect(local::encode_address(address), kPatienceNs, &peer).code, StatusCode::kUnsupported);
}

TEST(LocalAddress, AClosedRailIsUnreachableAndAWrongOneRefuses) {
  Endpoint endpoint;
  std::string gone;
  {
    Endpoint short_lived;
    gone = short_lived.rail->address();
  }
  std::unique_ptr<RailPeer> peer;
  EXPECT_EQ(endpoint.rail->connect(gone, kPatienceNs, &peer).code, StatusCode::kPeerUnreachable);
  local::RailAddress other;
  ASSERT_TRUE(local::decode_address(endpoint.rail->address(), &other).ok());
  other.rail_id ^= 2;
  EXPECT_EQ(endpoint.rail->connect(local::encode_address(other), kPatienceNs, &peer).code, StatusCode::kPeerRejected);
  other.process_start ^= 1;  // the same pid, another life
  EXPECT_EQ(endpoint.rail->connect(local::encode_address(other), kPatienceNs, &peer).code,
            StatusCode::kPeerUnreachable);
}

}  // namespace
}  // namespace asyncfabric
