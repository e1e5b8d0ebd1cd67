// libfabric_descriptors_test.cc: what a tcp rail opens for its connections, and to ask or answer peers, is closed again.
#include "libfabric_pair.h"

#include <dirent.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "providers/libfabric/peers/wire.h"

namespace asyncfabric::testing {
namespace {

size_t open_descriptors() {
  size_t count = 0;
  DIR* directory = opendir("/proc/self/fd");
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count;
}

// For this thread, and those that it starts. False: without the right to make one it stays in everybody's.
bool enter_own_network() {
  ifreq loopback{};
  std::strcpy(loopback.ifr_name, "lo");
  loopback.ifr_flags = IFF_UP;
  if (unshare(CLONE_NEWNET) != 0) return false;
  const int any = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const bool up = ioctl(any, SIOCSIFFLAGS, &loopback) == 0;
  close(any);
  return up;
}

// Alone in a network no test counts the connections of another process that got the port of one that is gone here.
void alone(const std::function<void()>& test) {
  std::thread([&] {
    (void)enter_own_network();
    test();
  }).join();
}

// Connections that are half made when the rail closes must not stay in the process.
void closes_while_connections_are_half_made() {
  { Side first(spec_of("tcp")); }  // what the library opens once stays
  const size_t before = open_descriptors();
  for (int i = 0; i < 3; ++i) {
    Side a(spec_of("tcp")), b(spec_of("tcp"));
    Link link(b, a);
    for (int pass = 0; pass < 20; ++pass) a.pump();
    a.rail.reset();
    for (int pass = 0; pass < 200; ++pass) b.pump();
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(LibfabricOpen, LeavesNoDescriptors) { alone(closes_while_connections_are_half_made); }

// Nobody is asked at whose address nobody listens: for that a connection would be opened.
void sees_a_crowd_go() {
  Side b(spec_of("tcp"));
  size_t before = 0, most = 0;
  for (uint32_t i = 0; i < 60; ++i) {
    {
      Side a(spec_of("tcp"));
      Link link(a, b);
      link.post(link.signal(1, 1), {&a, &b});
      ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() == 1; }));
    }
    for (int pass = 0; pass < 20; ++pass) b.pump();
    if (i == 0) before = open_descriptors();
    most = std::max(most, open_descriptors());
  }
  EXPECT_LE(most, before + 26) << "of those that lived when they were asked some are there, 9 to 13; of all, 51";
}

TEST(LibfabricOpen, ACrowdThatIsGoneTakesNoDescriptors) { alone(sees_a_crowd_go); }

// A listener at the name of an endpoint that is gone, as another process opens it when the kernel gives it that port.
class Successor {
 public:
  explicit Successor(const std::string& name) {
    const auto* address = reinterpret_cast<const sockaddr*>(name.data());
    fd_ = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int yes = 1;
    (void)setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    EXPECT_EQ(bind(fd_, address, static_cast<socklen_t>(name.size())), 0) << std::strerror(errno);
    EXPECT_EQ(listen(fd_, 8), 0);
  }
  ~Successor() { close(fd_); }
  Successor(const Successor&) = delete;
  Successor& operator=(const Successor&) = delete;

 private:
  int fd_ = -1;
};

std::string endpoint_name(const Side& side) {
  libfabric::RailAddress address;
  EXPECT_TRUE(libfabric::parse(side.rail->address(), &address));
  return address.name;
}

void release_some_memory(Side& side) {
  std::vector<uint8_t> bytes(4096);
  std::unique_ptr<LocalMemory> memory;
  std::string key;
  const Memory wanted{bytes.data(), bytes.size(), kHostDevice, -1, kAccessRemoteWrite};
  ASSERT_TRUE(side.rail->register_memory(wanted, &memory, &key).ok());
  EXPECT_TRUE(side.rail->release_memory(memory, kPatience).ok());
}

// Peers that are gone are asked all the same whether they are done, over connections of the rail's own.
void asks_those_that_are_gone(bool with_successor) {
  Side b(spec_of("tcp"));
  const size_t before = open_descriptors() + (with_successor ? 1 : 0);
  for (uint32_t round = 1; round <= 3; ++round) {
    std::string name;
    for (uint32_t i = 0; i < 4; ++i) {
      Side a(spec_of("tcp"));
      name = endpoint_name(a);
      Link link(a, b);
      link.post(link.signal(1, 1), {&a, &b});
      ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() == 1; }));
    }
    std::optional<Successor> successor;
    if (with_successor) successor.emplace(name);
    release_some_memory(b);
    EXPECT_TRUE(pump_until(
        {&b}, [&] { return open_descriptors() <= before; }, 2 * kSecond))
        << open_descriptors() - before << " descriptors in round " << round;
  }
}

TEST(LibfabricOpen, AskingThoseThatAreGoneLeavesNoDescriptors) {
  alone([] { asks_those_that_are_gone(false); });
}

// Another process got the port of one of them: it is taken for the peer, and never answers.
TEST(LibfabricOpen, AskingTheSuccessorOfOneThatIsGoneLeavesNoDescriptors) {
  alone([] { asks_those_that_are_gone(true); });
}

// Who closed its connection is asked too, and answers over one of its own. Both live on.
void answers_for_closed_connections() {
  Side a(spec_of("tcp")), b(spec_of("tcp"));
  ASSERT_TRUE(a.rail->require_admission().ok());
  ASSERT_TRUE(b.rail->require_admission().ok());
  const size_t before = open_descriptors();
  for (uint32_t round = 1; round <= 3; ++round) {
    b.connections.clear();
    {
      Link link(a, b);
      link.post(link.message("who I am", 1), {&a, &b});
      ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.connections.size() == 1; }));
      ASSERT_TRUE(b.rail->admit(b.connections[0]));
      ASSERT_TRUE(a.rail->disconnect(*link.peer).ok());
    }
    (void)while_pumping(a, [&] {
      release_some_memory(b);
      return Status();
    });
    EXPECT_TRUE(pump_until(
        {&a, &b}, [&] { return open_descriptors() <= before; }, 2 * kSecond))
        << open_descriptors() - before << " descriptors in round " << round;
  }
}

TEST(LibfabricOpen, AnsweringForAClosedConnectionLeavesNoDescriptors) { alone(answers_for_closed_connections); }

// A network of this thread's own with so few ports that those of the dead are given to the connections that ask them.
TEST(LibfabricOpen, AskingOverThePortsOfThoseThatAreGoneEnds) {
  const char* missing = nullptr;
  std::thread([&] {
    if (!enter_own_network()) return void(missing = "no right to make a network namespace");
    std::ofstream ports("/proc/sys/net/ipv4/ip_local_port_range");
    if (!(ports << "20000 20060" << std::flush)) return void(missing = "its ports cannot be set");
    ports.close();
    asks_those_that_are_gone(false);
  }).join();
  if (missing != nullptr) GTEST_SKIP() << "PORTS OF THE DEAD WERE NOT TAKEN: " << missing;
}

}  // namespace
}  // namespace asyncfabric::testing
