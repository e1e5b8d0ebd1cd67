// libfabric_leaving_test.cc: processes that ask a shm rail to let them in and leave before it has read that. libfabric 1.17 ends the
// process of a rail that reads the request of a segment which is gone.
#include <dirent.h>

#include "libfabric_child.h"

namespace asyncfabric::testing {
namespace {

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
    if (order == "disconnect") {
      EXPECT_TRUE(side->rail->disconnect(*link->peer).ok());
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
