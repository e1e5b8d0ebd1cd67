// verbs_link_test.cc: cables that are pulled and plugged in again, and lossy ones. Needs the soft-RoCE devices of `make rxe`: rxe1 and rxe2
// have their links on net1 and net2, which this test takes down or makes lossy (it runs as root of that machine).
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "rigs/engine_pair.h"
#include "verbs_rig.h"

namespace asyncfabric::verbs_rig {
namespace {

using testing::Pair;
using testing::Party;

bool has_cable() {
  return access("/sys/class/net/net1", F_OK) == 0 && access("/sys/class/net/net2", F_OK) == 0 && geteuid() == 0 &&
         getenv("ASYNCFABRIC_RXE") != nullptr;
}

#define NEED_CABLE() \
  NEED_VERBS();      \
  if (!has_cable()) GTEST_SKIP() << "NO CABLE TO PULL: runs in the VM of `make rxe`"

void run(const std::string& command) { ASSERT_EQ(std::system(command.c_str()), 0) << command; }

struct Pulled {  // while it lives
  Pulled() { run("ip link set net1 down"); }
  ~Pulled() { run("ip link set net1 up"); }
};
struct Lossy {
  explicit Lossy(const std::string& how) {
    for (const char* end : {"net1", "net2"}) run(std::string("tc qdisc add dev ") + end + " root netem " + how);
  }
  ~Lossy() {
    for (const char* end : {"net1", "net2"}) run(std::string("tc qdisc del dev ") + end + " root");
  }
};

// A short pull: the requests are sent again by the device, nothing fails, and the end whose cable it is reports that its rail was down.
TEST(VerbsLink, ShortPullLosesNothing) {
  NEED_CABLE();
  Side a("rxe1"), b("rxe2");
  Link link(a, b);
  link.post(link.signal(1, 1), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == 1 && a.done.size() == 1; }));
  fill(a.region, 3);
  {
    const Pulled pulled;
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.downs == 1; }));
    for (uint32_t i = 0; i < 20; ++i) link.post(link.write_imm(i * 4096, i * 4096, 4096, i, i), {});
    EXPECT_TRUE(b.imms.size() == 1);
  }
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.ups == 1; }));
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() == 21; }));
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return !a.path_down; }));
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == 21u - a.failed(); }));
  link.post(link.write_imm(0, 0, 1 << 20, 99, 99), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.back().first == 99 && b.imms.back() == 99u; }));
  EXPECT_EQ(a.region, b.region);
}

// A port is active before its network carries: the engine learns that the rail is up and the path is not, until something was answered.
TEST(VerbsLink, APathIsAskedBeforeItIsUsedAgain) {
  NEED_CABLE();
  const Words fast = {{"timeout", "15"}, {"retry", "2"}};
  Side a("rxe1", fast), b("rxe2", fast);
  Link link(a, b);
  link.post(link.signal(1, 1), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == 1 && a.done.size() == 1; }));
  {
    const Pulled pulled;  // nothing is under way
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.downs == 1; }));
  }
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.ups == 1; }));
  EXPECT_EQ(a.path_downs, 1u) << "nothing showed yet that the network carries";
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return !a.path_down; }));
  EXPECT_EQ(a.done.size(), 1u) << "the question is nobody's request";
  link.post(link.write_imm(0, 0, 4096, 2, 2), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() == 2 && b.imms.size() == 2; }));
  EXPECT_EQ(a.failed(), 0u);
}

// A long one: the device gives up, each request comes back with a name, nothing is counted twice, and the lanes are built again by themselves.
TEST(VerbsLink, LongPullFailsByNameAndHeals) {
  NEED_CABLE();
  const Words fast = {{"timeout", "15"}, {"retry", "2"}};  // a busy VM answers late
  Side a("rxe1", fast), b("rxe2", fast);
  Link link(a, b);
  const std::string text = "kept over the break";
  link.post(link.signal(1, 1), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == 1 && a.done.size() == 1; }));
  a.done.clear();
  {
    const Pulled pulled;
    for (uint32_t i = 0; i < 20; ++i) link.post(link.write_imm(0, i * 4096, 4096, i, i), {});
    link.post(link.message(text, 77), {});
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.failed() == 20; }));
    for (const auto& [tag, status] : a.done) EXPECT_EQ(status.code, StatusCode::kRailDown) << tag;
  }
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.ups == 1 && !a.path_down; }))
      << a.downs << " downs, " << a.ups << " ups, path down: " << a.path_down
      << ", rebuilt: " << a.figures().rebuilt_lanes;
  link.post(link.write_imm(0, 0, 1 << 20, 99, 99), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.back().first == 99 && b.imms.back() == 99u; }))
      << status_text(a.done.back().second.code) << ", tag " << a.done.back().first;
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return !b.messages.empty(); })) << "a message got lost";
  EXPECT_EQ(b.messages.front(), text);
  for (const uint32_t imm : b.imms) EXPECT_EQ(std::count(b.imms.begin(), b.imms.end(), imm), 1);
}

// Datagrams get lost here, and packets of data: connections are made all the same, and each immediate comes once, with its data.
TEST(VerbsLink, LossAndReorderingLoseNothing) {
  NEED_CABLE();
  const Lossy lossy("delay 1ms loss 5% reorder 25%");
  const Words fast = {{"timeout", "10"}};
  Side a("rxe1", fast), b("rxe2", fast);
  std::vector<std::unique_ptr<Link>> links;
  for (int i = 0; i < 12; ++i) links.push_back(std::make_unique<Link>(i % 2 == 0 ? a : b, i % 2 == 0 ? b : a));
  for (uint32_t i = 0; i < 240; ++i) {
    Link& link = *links[i % links.size()];
    if (i % 5 == 0)
      link.post(link.signal(i, i), {&a, &b});
    else
      link.post(link.write_imm(i * 4000, i * 4000, 4000, i, i), {&a, &b});
  }
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() + b.done.size() == 240; }, 60 * kSecond));
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.imms.size() + b.imms.size() == 240; }, 60 * kSecond));
  EXPECT_EQ(a.failed() + b.failed(), 0u);
}

// Two rails, one cable pulled under load (the other rail is rxe0, which reaches itself): unposted work goes round, ambiguous work fails by
// name, each success is counted once and no failure twice, and the rail serves again afterwards.
TEST(VerbsLink, OneOfTwoRailsGoesDownUnderLoad) {
  NEED_CABLE();
  EngineConfig config;
  const Words fast = {{"timeout", "15"}, {"retry", "6"}};  // a busy VM answers late
  config.rails = {{"verbs", "rxe1", fast}, {"verbs", "rxe0", fast}};
  config.peer_deadline_host_ns = 5 * kSecond;  // only the network is to fail
  EngineConfig other = config;
  other.rails[0].device = "rxe2";
  Pair pair(config);
  pair.b = std::make_unique<Party>(other);
  constexpr size_t kSize = 1 << 20;
  std::vector<uint8_t> source(kSize, 7), target(kSize, 0);
  const RegionId from = pair.add_region(*pair.a, source);
  const KeyId key = pair.give_key(*pair.b, pair.add_region(*pair.b, target), kSize, *pair.a);
  CounterId counter = 0;
  uint32_t imm = 0;
  ASSERT_TRUE(pair.b->engine->open_counter(5, &counter, &imm).ok());
  std::vector<uint64_t> cookies;
  const auto write = [&](uint64_t length) {
    cookies.push_back(pair.a->cookie());
    OpId op = 0;
    EXPECT_TRUE(pair.a->engine->submit_write(cookies.back(), from, 0, length, key, 0, 5, &op).ok());
  };
  write(64);
  ASSERT_TRUE(pair.wait(*pair.a, cookies[0]).status.ok());
  const auto all_done = [&] {
    return std::all_of(cookies.begin(), cookies.end(), [&](uint64_t each) { return pair.a->done.contains(each); });
  };
  for (int i = 0; i < 300; ++i) write(32 * 1024);
  {
    const Pulled pulled;
    for (int i = 0; i < 300; ++i) write(32 * 1024);
    ASSERT_TRUE(pair.until(all_done, 60));
    EXPECT_FALSE(pair.a->engine->rails()[0].up);
    EXPECT_TRUE(pair.a->engine->rails()[1].up);
    EXPECT_EQ(pair.a->engine->peers().at(0).state, 1u) << "the peer lives, its other rail answers";
  }
  uint64_t good = 0, failed = 0;
  for (const uint64_t cookie : cookies) {
    const Status status = pair.a->done[cookie].status;
    status.ok() ? ++good : ++failed;
    if (!status.ok()) { EXPECT_TRUE(status.code == StatusCode::kRailDown || status.code == StatusCode::kAmbiguous); }
  }
  EXPECT_GT(good, 300u);
  ASSERT_TRUE(pair.until([&] { return pair.b->engine->counter_value(counter) >= good; }));
  ASSERT_TRUE(pair.until([&] { return pair.a->engine->rails()[0].up; }));
  // The network carries a moment after its port is up. Until then the other rail serves, and nothing fails.
  for (const uint64_t until = now_ns() + 60 * kSecond; now_ns() < until;) {
    write(kSize);
    const Completion done = pair.wait(*pair.a, cookies.back());
    ASSERT_TRUE(done.status.ok()) << status_text(done.status.code);
    ++good;
    if (done.rails == 3) break;
  }
  cookies.clear();
  for (int i = 0; i < 50; ++i) write(kSize);
  ASSERT_TRUE(pair.until(all_done, 60));
  for (const uint64_t cookie : cookies) EXPECT_STREQ(status_text(pair.a->done[cookie].status.code), "ok");
  EXPECT_EQ(pair.a->done[cookies.back()].rails, 3u) << "the mended rail serves again";
  ASSERT_TRUE(pair.until([&] { return pair.b->engine->counter_value(counter) >= good + 50; }));
  EXPECT_LE(pair.b->engine->counter_value(counter), good + failed + 50) << "counted twice";
}

}  // namespace
}  // namespace asyncfabric::verbs_rig
