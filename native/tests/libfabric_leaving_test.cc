// libfabric_leaving_test.cc: processes that ask a shm rail to let them in and leave before it has read that. libfabric 1.17 ends the
// process of a rail that reads the request of a segment which is gone.
#include <dirent.h>

#include <fstream>

#include "libfabric_child.h"
#include "providers/libfabric/process.h"
#include "providers/libfabric/segment.h"

namespace asyncfabric::testing {
namespace {

constexpr size_t kVisits = 600;       // libfabric's table has room for 256
constexpr uint64_t kPiece = 1 << 16;  // fetched by the target from the process that its table names

// Comes and goes, and writes over the first connection all the while.
void visit(Side& side, const Link& resident, const std::string& address, const std::string& key) {
  const auto write = [&side](const Link& link) {
    const size_t before = side.done.size();
    const WorkRequest request = link.write_imm(0, 0, kPiece, before, 1);
    ASSERT_EQ(side.rail->post({&request, 1}).accepted, 1u);
    ASSERT_TRUE(pump_until({&side}, [&] { return side.done.size() == before + 1; }));
    ASSERT_TRUE(side.done.back().second.ok());
  };
  fill(side.region, 3);
  for (size_t i = 0; i < kVisits && !::testing::Test::HasFatalFailure(); ++i) {
    Link visitor(side, address, key);
    write(visitor);
    if (i % 10 == 0) write(resident);
    EXPECT_TRUE(side.rail->disconnect(*visitor.peer).ok());
  }
}

// "caller": asks to be let in with its first post and, when told so, disconnects, closes its rail or just stays.
// "target": answers each immediate with itself + 1.
TEST(LibfabricChildRole, Run) {
  const std::string role = child_role();
  if (role.empty()) GTEST_SKIP() << "runs only as the child of another test";
  auto side = std::make_unique<Side>(spec_of("shm"));
  send_text(kChildFd, side->rail->address());
  send_text(kChildFd, side->key);
  const std::string address = receive_text(kChildFd);
  const std::string key = receive_text(kChildFd);
  ASSERT_FALSE(address.empty());
  auto link = std::make_unique<Link>(*side, address, key);
  if (role == "target") {
    for (size_t answered = 0; !has_input(kChildFd); side->pump())
      for (; answered < side->imms.size(); ++answered)
        link->post(link->signal(answered, side->imms[answered] + 1), {side.get()});
    return;
  }
  link->post(link->signal(0, 7), {});
  send_text(kChildFd, "asked");
  for (std::string order = receive_text(kChildFd); !order.empty(); order = receive_text(kChildFd)) {
    if (order == "visits") {
      visit(*side, *link, address, key);
    } else if (order == "disconnect") {
      EXPECT_TRUE(side->rail->disconnect(*link->peer).ok());
    } else if (order == "arrive") {
      EXPECT_TRUE(pump_until({side.get()}, [&] { return side->done.size() == 1; }));
    } else if (order == "poll") {
      for (int i = 0; i < 1000; ++i) side->pump();
    } else {
      link.reset();
      side->memory.reset();
      side.reset();
    }
    send_text(kChildFd, "done");
  }
}

struct Remote {
  Remote(Side& side, const std::string& role) : child(role, "shm") {
    address = receive_text(child.control);
    key = receive_text(child.control);
    EXPECT_FALSE(address.empty());
    send_text(child.control, side.rail->address());
    send_text(child.control, side.key);
    if (role == "caller") { EXPECT_EQ(receive_text(child.control), "asked"); }
  }
  void order(const std::string& text) {
    send_text(child.control, text);
    EXPECT_EQ(receive_text(child.control), "done");
  }
  Child child;
  std::string address;
  std::string key;
};

size_t segments_of(pid_t pid) {
  const std::string prefix = "asyncfabric_" + std::to_string(pid) + "_";
  size_t count = 0;
  DIR* directory = opendir("/dev/shm");
  while (const dirent* entry = readdir(directory)) count += std::string(entry->d_name).starts_with(prefix) ? 1 : 0;
  closedir(directory);
  return count;
}

// The rail still serves: a newcomer is answered.
void expect_service(Side& a) {
  const size_t before = a.imms.size();
  Remote other(a, "target");
  Link link(a, other.address, other.key);
  link.post(link.signal(1, 40), {&a});
  ASSERT_TRUE(pump_until({&a}, [&] { return a.imms.size() > before; }));
  EXPECT_EQ(a.imms.back(), 41u);
  EXPECT_EQ(other.child.finish(), 0);
}

TEST(LibfabricShmLeaving, RailClosedBeforeItsRequestWasRead) {
  Side a(spec_of("shm"));
  Remote caller(a, "caller");
  const pid_t pid = caller.child.pid;
  const uint64_t start = now_ns();
  caller.order("close");
  EXPECT_LT(now_ns() - start, 2 * kSecond);  // a target that never reads holds nobody up
  EXPECT_EQ(caller.child.finish(), 0);
  expect_service(a);
  Side sweeper(spec_of("shm"));
  EXPECT_EQ(segments_of(pid), 0u);
}

TEST(LibfabricShmLeaving, DisconnectedBeforeItsRequestWasRead) {
  Side a(spec_of("shm"));
  Remote caller(a, "caller");
  caller.order("disconnect");
  expect_service(a);
  caller.order("poll");
  EXPECT_EQ(segments_of(caller.child.pid), 1u);  // the one that others write to
  caller.order("close");
  EXPECT_EQ(segments_of(caller.child.pid), 0u);
  EXPECT_EQ(caller.child.finish(), 0);
}

// Whoever opens a shm rail removes what the dead left in /dev/shm, but not what somebody alive is about to open.
TEST(LibfabricShmLeaving, KilledBeforeItsRequestWasRead) {
  Side a(spec_of("shm"));
  Remote caller(a, "caller");
  const pid_t pid = caller.child.pid;
  caller.child.die();
  { Side sweeper(spec_of("shm")); }
  expect_service(a);
  Side sweeper(spec_of("shm"));
  EXPECT_EQ(segments_of(pid), 0u);
}

size_t mapped_segments() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("/dev/shm/asyncfabric_") != std::string::npos;
  return count;
}

// Callers leave libfabric's table when they go, with their memory: one place serves any number of them after each other.
TEST(LibfabricShmLeaving, CallersComeAndGo) {
  Side a(spec_of("shm"));
  if (a.rail->info().version.find("1.17") == std::string::npos) GTEST_SKIP() << "this libfabric has another table";
  Remote caller(a, "caller"), killed(a, "caller");
  for (const Remote* one : {&caller, &killed}) {
    send_text(one->child.control, "arrive");
    ASSERT_TRUE(pump_until({&a}, [&] { return has_input(one->child.control); }));
    EXPECT_EQ(receive_text(one->child.control), "done");
  }
  killed.child.die();
  send_text(caller.child.control, "visits");
  ASSERT_TRUE(pump_until({&a}, [&] { return has_input(caller.child.control); }, 100 * kSecond));
  EXPECT_EQ(receive_text(caller.child.control), "done");
  EXPECT_EQ(a.imms.size(), 2 + kVisits + kVisits / 10);
  EXPECT_EQ(a.region[kPiece - 1], pattern(kPiece - 1, 3));
  ASSERT_TRUE(pump_until({&a}, [] { return mapped_segments() < 10; }));
  caller.order("close");
  EXPECT_EQ(caller.child.finish(), 0);
  expect_service(a);
}

// The 257th would take the place of another.
TEST(LibfabricShmLeaving, FullRailIsNotCalled) {
  Side a(spec_of("shm"));
  if (a.rail->info().version.find("1.17") == std::string::npos) GTEST_SKIP() << "this libfabric has another table";
  Remote target(a, "target");
  std::unique_ptr<libfabric::Segment> segment;
  for (const std::string& name : libfabric::shm_segments_of(target.child.pid)) segment = libfabric::Segment::open(name);
  ASSERT_NE(segment, nullptr);
  const std::span<libfabric::SegmentPeer> peers = segment->peers();
  std::unique_ptr<RailPeer> peer;
  for (libfabric::SegmentPeer& one : peers.subspan(0, 240)) one.number = 0;
  EXPECT_EQ(a.rail->connect(target.address, kPatience, &peer).code, StatusCode::kPeerUnreachable);
  for (libfabric::SegmentPeer& one : peers.subspan(0, 240)) one.number = -1;
  EXPECT_TRUE(a.rail->connect(target.address, kPatience, &peer).ok());
  EXPECT_EQ(target.child.finish(), 0);
}

// libfabric would give it the place of the next one that comes.
TEST(LibfabricShmLeaving, RailThatIsGoneIsNotCalled) {
  Side a(spec_of("shm"));
  if (a.rail->info().version.find("1.17") == std::string::npos) GTEST_SKIP() << "this libfabric has another table";
  Remote gone(a, "caller");
  gone.order("close");
  std::unique_ptr<RailPeer> peer;
  EXPECT_EQ(a.rail->connect(gone.address, kPatience, &peer).code, StatusCode::kPeerUnreachable);
  expect_service(a);
  EXPECT_EQ(gone.child.finish(), 0);
}

// Nobody waits for a target that will never read: its process is gone, or its rail is.
TEST(LibfabricShmLeaving, NobodyWaitsForATargetThatIsGone) {
  auto a = std::make_unique<Side>(spec_of("shm"));
  Remote caller(*a, "caller");
  a->memory.reset();
  a.reset();
  const uint64_t start = now_ns();
  caller.order("close");
  EXPECT_LT(now_ns() - start, kSecond / 4);
  EXPECT_EQ(segments_of(caller.child.pid), 0u);
  EXPECT_EQ(caller.child.finish(), 0);
}

// The end of one connection leaves another to the same rail alone.
TEST(LibfabricShmLeaving, OneOfTwoConnectionsToTheSameRailEnds) {
  Side a(spec_of("shm"));
  Remote target(a, "target");
  Link first(a, target.address, target.key), second(a, target.address, target.key);
  first.post(first.write_imm(0, 0, 1 << 16, 1, 10), {&a});
  second.post(second.write_imm(0, 0, 1 << 16, 2, 20), {&a});
  ASSERT_TRUE(pump_until({&a}, [&] { return a.done.size() == 2 && a.imms.size() == 2; }));
  EXPECT_TRUE(a.rail->disconnect(*first.peer).ok());
  second.post(second.write_imm(0, 0, 1 << 16, 3, 30), {&a});
  ASSERT_TRUE(pump_until({&a}, [&] { return a.done.size() == 3 && a.imms.size() == 3; }));
  EXPECT_TRUE(a.done.back().second.ok());
  EXPECT_EQ(a.imms.back(), 31u);
  Link third(a, target.address, target.key);
  EXPECT_TRUE(a.rail->disconnect(*second.peer).ok());
  third.post(third.signal(4, 40), {&a});
  ASSERT_TRUE(pump_until({&a}, [&] { return a.imms.size() == 4; }));
  EXPECT_EQ(target.child.finish(), 0);
}

}  // namespace
}  // namespace asyncfabric::testing
