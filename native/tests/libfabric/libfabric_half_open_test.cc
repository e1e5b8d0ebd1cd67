// libfabric_half_open_test.cc: connections whose other side sends nothing: libfabric would keep each of them. A rail keeps few, and serves those
// who send.
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

#include "base/unique_fd.h"
#include "libfabric_pair.h"
#include "providers/libfabric/peers/half_open.h"
#include "providers/libfabric/peers/streams.h"
#include "providers/libfabric/peers/wire.h"

namespace asyncfabric::testing {
namespace {

using libfabric::HalfOpen;

std::string name_of(const Side& side) {
  libfabric::RailAddress address;
  EXPECT_TRUE(libfabric::parse(side.rail->address(), &address));
  return address.name;
}

UniqueFd knock(const std::string& name) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in target{};
  std::memcpy(&target, name.data(), std::min(name.size(), sizeof target));
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&target), sizeof target), 0);
  return socket;
}

TEST(LibfabricHalfOpen, WhoSendsNothingIsHungUpOnAndPeersAreNot) {
  Side a(spec_of("tcp")), b(spec_of("tcp"));
  Link link(a, b);
  link.post(link.write_imm(0, 0, 64, 1, 1), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == 1 && a.done.size() == 1; }));
  const std::string name = name_of(b);
  const size_t peers = libfabric::connections_to(name).size();
  ASSERT_GE(peers, 1u);
  std::vector<UniqueFd> mute;
  for (int i = 0; i < 400; ++i) {
    mute.push_back(knock(name));
    b.pump();
  }
  const size_t most = peers + HalfOpen::kMost + HalfOpen::kNewDescriptors;
  EXPECT_TRUE(pump_until({&a, &b}, [&] { return libfabric::connections_to(name).size() <= most; }))
      << libfabric::connections_to(name).size() << " connections are kept";
  link.post(link.write_imm(0, 0, 64, 2, 2), {&a, &b});
  Side c(spec_of("tcp"));
  Link other(c, b);
  other.post(other.write_imm(0, 0, 64, 1, 3), {&b, &c});
  EXPECT_TRUE(pump_until({&a, &b, &c}, [&] { return b.imms.size() == 3 && a.done.size() == 2 && c.done.size() == 1; }));
  EXPECT_TRUE(a.lost.empty());
  for (const auto& [tag, status] : a.done) EXPECT_TRUE(status.ok()) << tag;
}

// They came while the engine had no processor; it has nothing else to do, and would sleep once they are accepted.
TEST(LibfabricHalfOpen, HundredsThatCameAtOnceAreHungUpOnBeforeSleep) {
  Side b(spec_of("tcp"));
  const std::string name = name_of(b);
  std::vector<UniqueFd> mute;
  while (mute.size() < 600) mute.push_back(knock(name));
  for (bool sleeps = false; !sleeps;) {
    b.pump();
    pollfd entry{b.rail->wait_fd(), POLLIN, 0};
    sleeps = b.rail->prepare_wait() && ::poll(&entry, 1, 50) == 0;
  }
  EXPECT_LE(libfabric::connections_to(name).size(), HalfOpen::kMost + HalfOpen::kNewDescriptors);
}

// libfabric asks errno although its read did not fail: where that is EAGAIN still, it forgets a connection that has ended.
TEST(LibfabricHalfOpen, WhoEndsItWithoutARequestLeavesNoDescriptor) {
  Side b(spec_of("tcp"));
  const std::string name = name_of(b);
  std::vector<UniqueFd> mute;
  while (mute.size() < HalfOpen::kNewDescriptors) mute.push_back(knock(name));  // fewer are left alone
  size_t accepted = 0;
  const auto look = [&] {
    accepted = libfabric::connections_to(name).size();
    errno = EAGAIN;
    return accepted;
  };
  ASSERT_TRUE(pump_until({&b}, [&] { return look() == mute.size(); }));
  for (const UniqueFd& one : mute) EXPECT_EQ(send(one.get(), "half", 4, 0), 4);
  EXPECT_TRUE(pump_until({&b}, [&] { return look() == mute.size(); }));
  mute.clear();
  EXPECT_TRUE(pump_until({&b}, [&] { return look() == 0; }, 3 * kSecond)) << accepted << " descriptors are kept";
}

// A sender that is stopped answers no fence.
TEST(LibfabricFence, MemoryWhoseKeyNeverLeftIsGivenBackBesideASenderThatDoesNotAnswer) {
  Side a(spec_of("tcp")), b(spec_of("tcp"));
  Link link(a, b);
  link.post(link.write_imm(0, 0, 64, 1, 1), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == 1 && a.done.size() == 1; }));
  std::vector<uint8_t> bytes(4096);
  std::unique_ptr<LocalMemory> kept;
  std::string key;
  ASSERT_TRUE(b.rail->register_memory({bytes.data(), bytes.size(), kHostDevice, -1, 3}, &kept, &key).ok());
  kept->handed_out = false;
  EXPECT_TRUE(b.rail->release_memory(kept, 50'000'000).ok());
  EXPECT_EQ(b.rail->release_memory(b.memory, 50'000'000).code, StatusCode::kDrainTimeout);
}

}  // namespace
}  // namespace asyncfabric::testing
