// verbs_silence_test.cc: devices that take requests and never report them, which the verbs do not allow and real ones do: each request ends by
// name in bounded time, nothing is lost or counted twice, and the connection goes on. Two rails in one process, driven by hand.
#include <mutex>
#include <set>

#include "providers/verbs/transfers/receives.h"
#include "verbs_rig.h"

namespace asyncfabric::verbs_rig {
namespace {

// libibverbs as it is, but what the devices opened through it report of sends over RC can be swallowed.
struct Muffled {
  static inline std::atomic<bool> on{false};
  static inline int (*poll)(ibv_cq*, int, ibv_wc*) = nullptr;
  static inline const verbs::Library* real = nullptr;
  static inline std::mutex lock;
  static inline std::set<uint32_t> reliable;  // numbers of queue pairs

  static int poll_muffled(ibv_cq* cq, int capacity, ibv_wc* work) {
    const int count = poll(cq, capacity, work);
    if (!on || count <= 0) return count;
    const std::lock_guard<std::mutex> guard(lock);
    const auto swallowed = [](const ibv_wc& each) {
      return reliable.contains(each.qp_num) && verbs::kind_of(each.wr_id) == verbs::Kind::kSend;
    };
    return static_cast<int>(std::remove_if(work, work + count, swallowed) - work);
  }
  static ibv_context* open_device(ibv_device* device) {
    ibv_context* context = real->ibv_open_device(device);
    if (context == nullptr) return nullptr;
    poll = context->ops.poll_cq;
    context->ops.poll_cq = poll_muffled;
    return context;
  }
  static ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* attributes) {
    ibv_qp* qp = real->ibv_create_qp(pd, attributes);
    const std::lock_guard<std::mutex> guard(lock);
    if (qp != nullptr && attributes->qp_type == IBV_QPT_RC) reliable.insert(qp->qp_num);
    return qp;
  }
  static const verbs::Library& library() {
    static const verbs::Library made = [] {
      std::string detail;
      real = verbs::open_library("", &detail);
      EXPECT_NE(real, nullptr) << detail;
      verbs::Library copy = *real;
      copy.ibv_open_device = open_device;
      copy.ibv_create_qp = create_qp;
      return copy;
    }();
    return made;
  }
  static Status open_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail) {
    verbs::Options options;
    if (const Status status = verbs::parse_options(spec, &options, detail); !status.ok()) return status;
    return verbs::VerbsRail::open(library(), options, out, detail);
  }

  Muffled() { on = true; }
  ~Muffled() { on = false; }
};

const Words kImpatient = {{"silence", "300"}};

void expect_each_once(const Side& side) {
  for (const uint32_t imm : side.imms) EXPECT_EQ(std::count(side.imms.begin(), side.imms.end(), imm), 1) << imm;
}

// Not even the flush is reported: the queue pair is destroyed, and its requests end then.
TEST(VerbsSilence, ADeviceThatReportsNothingIsNotWaitedFor) {
  NEED_VERBS();
  Side a(device_a(), kImpatient, 1 << 20, kAccessRemoteWrite, Muffled::open_rail), b(device_b());
  Link link(a, b);
  link.post(link.signal(1000, 1000), {&a, &b});
  link.post(link.write_imm(0, 0, 64, 1001, 1001), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == 2 && a.done.size() == 2; }));
  {
    const Muffled muffled;
    for (uint32_t i = 0; i < 20; ++i) link.post(link.write_imm(i * 4096, i * 4096, 4096, i, i), {&a, &b});
    for (uint32_t i = 20; i < 25; ++i) link.post(link.signal(i, i), {&a, &b});
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() == 27; })) << a.done.size() << " of 27 ended";
  }
  EXPECT_EQ(a.failed(), 25u);
  for (const auto& [tag, status] : a.done) {
    if (tag < 1000) { EXPECT_EQ(status.code, StatusCode::kAmbiguous) << tag; }
  }
  EXPECT_EQ(a.figures().silent_lanes, 2u);
  fill(a.region, 5);
  link.post(link.write_imm(0, 0, 1 << 20, 99, 99), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.back().first == 99 && b.imms.back() == 99u; }));
  EXPECT_TRUE(a.done.back().second.ok());
  EXPECT_EQ(a.region, b.region);
  EXPECT_FALSE(a.path_down);
  expect_each_once(b);
}

// The target has no receives and tries for ever are allowed: the flush reports what did not go.
TEST(VerbsSilence, ATargetThatTakesNothingIsNotWaitedFor) {
  NEED_VERBS();
  Side a(device_a(), kImpatient), b(device_b(), {{"receives", "4"}});
  Link link(a, b);
  link.post(link.write_imm(0, 0, 64, 1000, 1000), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == 1 && a.done.size() == 1; }));
  for (uint32_t i = 0; i < 20; ++i) link.post(link.write_imm(0, 0, 4096, i, i), {&a});
  ASSERT_TRUE(pump_until({&a}, [&] { return a.done.size() == 21; })) << a.done.size() << " of 21 ended";
  EXPECT_GE(a.failed(), 16u - 4u);
  for (const auto& [tag, status] : a.done)
    if (!status.ok()) { EXPECT_EQ(status.code, StatusCode::kAmbiguous) << tag; }
  EXPECT_GE(a.figures().silent_lanes, 1u);
  link.post(link.write_imm(0, 0, 4096, 99, 99), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.back().first == 99 && b.imms.back() == 99u; }));
  EXPECT_GE(b.imms.size() - 2, 20 - a.failed()) << "a success was not counted";
  expect_each_once(b);
}

// The word that messages were taken does not come: the lane begins anew, and every message arrives.
TEST(VerbsSilence, AMissingCreditDoesNotHoldMessagesForEver) {
  NEED_VERBS();
  Side a(device_a(), kImpatient), b(device_b());
  Link link(a, b);
  for (uint64_t i = 0; i < 20; ++i) link.post(link.message("message " + std::to_string(i), i), {&a});
  ASSERT_TRUE(pump_until({&a}, [&] { return a.figures().silent_lanes == 1; }));
  ASSERT_TRUE(pump_until(
      {&a, &b}, [&] { return a.done.size() == 20 && !b.messages.empty() && b.messages.back() == "message 19"; }));
  EXPECT_EQ(a.failed(), 0u);
  for (uint64_t i = 0; i < 20; ++i)
    EXPECT_NE(std::count(b.messages.begin(), b.messages.end(), "message " + std::to_string(i)), 0) << i;
}

// A long queue of long writes is no silence: it ends when it ends.
TEST(VerbsSilence, SlowIsNotSilent) {
  NEED_VERBS();
  Side a(device_a(), {{"silence", "100"}, {"chain", "16"}}, 8 << 20), b(device_b(), {}, 8 << 20);
  Link link(a, b);
  link.post(link.write_imm(0, 0, 64, 1000, 1000), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() == 1; }));
  a.done.clear();
  std::vector<WorkRequest> requests;
  for (uint32_t i = 0; i < 16; ++i) requests.push_back(link.write_imm(0, 0, 8 << 20, i, i));
  ASSERT_EQ(a.rail->post(requests).accepted, requests.size());
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() == requests.size(); }, 4 * kPatience));
  for (const auto& [tag, status] : a.done) EXPECT_STREQ(status_text(status.code), "ok") << status.raw;
  EXPECT_EQ(a.figures().silent_lanes, 0u);
}

}  // namespace
}  // namespace asyncfabric::verbs_rig
