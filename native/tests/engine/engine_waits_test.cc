// engine_waits_test.cc: what waits for a peer that does not answer waits alone: registrations, and releases of other memory, do not come
// behind it. The rail below has such a peer, which keeps some regions until the test lets it go.
#include <time.h>

#include <atomic>
#include <mutex>
#include <set>

#include "rigs/engine_pair.h"

namespace asyncfabric::testing {
namespace {

// The mute peer of all rails of the test.
class MutePeer {
 public:
  void take(const void* base) {
    const std::lock_guard<std::mutex> guard(mutex_);
    bases_.insert(base);
  }
  void go() {
    const std::lock_guard<std::mutex> guard(mutex_);
    bases_.clear();
    hides_ = false;
  }
  void hide() {
    asked_ = false;
    hides_ = true;
  }
  bool shows() {
    asked_ = true;
    return !hides_;
  }
  bool was_asked() const { return asked_; }
  bool holds(const void* base) {
    const std::lock_guard<std::mutex> guard(mutex_);
    return bases_.contains(base);
  }

 private:
  std::mutex mutex_;
  std::set<const void*> bases_;
  std::atomic<bool> hides_{false}, asked_{false};  // it shows nobody its memory
};

MutePeer& mute_peer() {
  static MutePeer* only = new MutePeer;
  return *only;
}

struct HeldMemory : LocalMemory {
  std::unique_ptr<LocalMemory> inner;
  const void* base = nullptr;
};

class MutedRail final : public Rail {
 public:
  explicit MutedRail(const RailSpec& spec) : inner_(spec) {}
  const Capabilities& capabilities() const override { return inner_.capabilities(); }
  RailInfo info() const override { return inner_.info(); }
  std::string address() const override { return inner_.address(); }
  Status register_memory(const Memory& memory, std::unique_ptr<LocalMemory>* out, std::string* key) override {
    auto held = std::make_unique<HeldMemory>();
    held->base = memory.base;
    const Status status = inner_.register_memory(memory, &held->inner, key);
    if (status.ok()) *out = std::move(held);
    return status;
  }
  Status narrow_key(LocalMemory& memory, const KeyScope& scope, std::string* key) override {
    return inner_.narrow_key(*static_cast<HeldMemory&>(memory).inner, scope, key);
  }
  Status revoke_memory(LocalMemory& memory, uint64_t patience_ns, std::string* new_key) override {
    auto& held = static_cast<HeldMemory&>(memory);
    if (waits_in_vain(held, patience_ns)) return StatusCode::kDrainTimeout;
    return inner_.revoke_memory(*held.inner, patience_ns, new_key);
  }
  Status release_memory(std::unique_ptr<LocalMemory>& memory, uint64_t patience_ns) override {
    auto& held = static_cast<HeldMemory&>(*memory);
    if (held.handed_out && waits_in_vain(held, patience_ns)) return StatusCode::kDrainTimeout;
    const Status status = inner_.release_memory(held.inner, patience_ns);
    if (status.ok()) memory.reset();
    return status;
  }
  Status connect(std::string_view address, uint64_t patience_ns, std::unique_ptr<RailPeer>* out) override {
    return inner_.connect(address, patience_ns, out);
  }
  Status attach(RailPeer& peer, std::string_view key, uint64_t patience_ns,
                std::unique_ptr<RemoteMemory>* out) override {
    if (!until_it_goes(patience_ns, [] { return !mute_peer().shows(); })) return StatusCode::kBusy;
    return inner_.attach(peer, key, 0, out);
  }
  Status disconnect(RailPeer& peer) override { return inner_.disconnect(peer); }
  PostResult post(std::span<const WorkRequest> requests) override { return inner_.post(requests); }
  size_t poll(std::span<RailEvent> events) override { return inner_.poll(events); }
  int wait_fd() const override { return inner_.wait_fd(); }
  bool prepare_wait() override { return inner_.prepare_wait(); }
  void cancel_wait() override { inner_.cancel_wait(); }

 private:
  template <class Holds>
  static bool until_it_goes(uint64_t patience_ns, Holds holds) {
    const uint64_t until = now_ns() + patience_ns;
    while (holds()) {
      if (now_ns() >= until) return false;
      const timespec nap{0, 50'000};
      nanosleep(&nap, nullptr);
    }
    return true;
  }
  static bool waits_in_vain(const HeldMemory& held, uint64_t patience_ns) {
    return !until_it_goes(patience_ns, [&] { return mute_peer().holds(held.base); });
  }
  LoopbackRail inner_;
};

Status open_muted_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string*) {
  *out = std::make_unique<MutedRail>(spec);
  return {};
}

constexpr size_t kHeld = 20;
constexpr uint64_t kDeadlineNs = 1'500'000'000;
constexpr uint64_t kEndlessNs = 60'000'000'000;  // longer than a test waits

EngineConfig muted() {
  static const bool once = (add_provider("muted", open_muted_rail), true);
  (void)once;
  EngineConfig config;
  config.rails = {{"muted", "", {}}};
  config.polling = PollingMode::kAdaptive;
  config.drain_deadline_ns = kDeadlineNs;
  config.connect_deadline_ns = kEndlessNs;
  return config;
}

// Writes to memory of the other fabric that nobody has used before, and that it does not show.
class Unshown {
 public:
  explicit Unshown(Pair& pair) : cookie(pair.a->cookie()), pair_(pair) {
    pair.connect(*pair.a, *pair.b);
    mute_peer().hide();
    const RegionId source = pair.add_region(*pair.a, own_);
    const KeyId key = pair.give_key(*pair.b, pair.add_region(*pair.b, theirs_), theirs_.size(), *pair.a);
    OpId op = 0;
    EXPECT_TRUE(pair.a->engine->submit_write(cookie, source, 0, own_.size(), key, 0, kNoImm, &op).ok());
  }
  Status status() { return pair_.wait(*pair_.a, cookie).status; }
  bool arrived() const { return own_ == theirs_; }

  const uint64_t cookie;

 private:
  Pair& pair_;
  std::vector<uint8_t> own_ = std::vector<uint8_t>(64, 7), theirs_ = std::vector<uint8_t>(64, 0);
};

class EngineWaits : public ::testing::Test {
 protected:
  EngineWaits() : pair_(muted()), memory_(kHeld, std::vector<uint8_t>(64)) {
    for (std::vector<uint8_t>& bytes : memory_) {
      regions_.push_back(pair_.add_region(*pair_.a, bytes));
      std::string key;
      EXPECT_TRUE(pair_.a->engine->region_key(regions_.back(), 3, 0, 64, false, &key).ok());
    }
    for (const std::vector<uint8_t>& bytes : memory_) mute_peer().take(bytes.data());
  }
  ~EngineWaits() override { mute_peer().go(); }

  template <class Submit>
  std::vector<uint64_t> submit_all(Submit submit) {
    std::vector<uint64_t> cookies;
    for (const RegionId region : regions_) {
      cookies.push_back(pair_.a->cookie());
      EXPECT_TRUE(submit(cookies.back(), region).ok());
    }
    return cookies;
  }
  Status release(uint64_t cookie, RegionId region) { return pair_.a->engine->submit_release(cookie, region); }
  size_t done(const std::vector<uint64_t>& cookies) const {
    return static_cast<size_t>(
        std::count_if(cookies.begin(), cookies.end(), [&](uint64_t cookie) { return pair_.a->done.contains(cookie); }));
  }
  // Registers, revokes and releases memory that the mute peer never had.
  void expect_others_go_on(const std::vector<uint64_t>& waiting) {
    std::vector<uint8_t> bytes(64);
    const RegionId region = pair_.add_region(*pair_.a, bytes);
    const uint64_t revoke = pair_.a->cookie();
    ASSERT_TRUE(pair_.a->engine->submit_revoke(revoke, region).ok());
    EXPECT_TRUE(pair_.wait(*pair_.a, revoke).status.ok());
    const uint64_t free = pair_.a->cookie();
    ASSERT_TRUE(release(free, region).ok());
    EXPECT_TRUE(pair_.wait(*pair_.a, free).status.ok());
    EXPECT_EQ(done(waiting), 0u) << "it came behind those that wait";
  }

  Pair pair_;
  std::vector<std::vector<uint8_t>> memory_;
  std::vector<RegionId> regions_;
};

TEST_F(EngineWaits, NobodyWaitsBehindReleasesThatWaitForAPeer) {
  const std::vector<uint64_t> waiting =
      submit_all([&](uint64_t cookie, RegionId region) { return release(cookie, region); });
  expect_others_go_on(waiting);
  mute_peer().go();
  for (const uint64_t cookie : waiting) EXPECT_TRUE(pair_.wait(*pair_.a, cookie).status.ok());
  EXPECT_EQ(pair_.a->engine->statistics().quarantined_regions, 0u);
}

TEST_F(EngineWaits, NobodyWaitsBehindRevocationsThatWaitForAPeer) {
  const std::vector<uint64_t> waiting =
      submit_all([&](uint64_t cookie, RegionId region) { return pair_.a->engine->submit_revoke(cookie, region); });
  expect_others_go_on(waiting);
  std::string key;
  EXPECT_EQ(pair_.a->engine->region_key(regions_[0], 3, 0, 64, false, &key).code, StatusCode::kBusy);
  mute_peer().go();
  for (const uint64_t cookie : waiting) EXPECT_TRUE(pair_.wait(*pair_.a, cookie).status.ok());
  EXPECT_TRUE(pair_.a->engine->region_key(regions_[0], 3, 0, 64, false, &key).ok());
}

TEST_F(EngineWaits, TheirDeadlinesRunTogetherAndTheRegionsAreFreedWhenThePeerIsGone) {
  const uint64_t begun = now_ns();
  const std::vector<uint64_t> waiting =
      submit_all([&](uint64_t cookie, RegionId region) { return release(cookie, region); });
  for (const uint64_t cookie : waiting) EXPECT_EQ(pair_.wait(*pair_.a, cookie).status.code, StatusCode::kDrainTimeout);
  EXPECT_LT(now_ns() - begun, 5 * kDeadlineNs) << "one deadline after the other";
  EXPECT_EQ(pair_.a->engine->statistics().quarantined_regions, kHeld);
  mute_peer().go();
  EXPECT_TRUE(pair_.until([&] { return pair_.a->engine->statistics().quarantined_regions == 0; }));
}

TEST_F(EngineWaits, NobodyIsAskedAboutMemoryWhoseKeyNeverLeft) {
  std::vector<uint8_t> bytes(64);
  const RegionId region = pair_.add_region(*pair_.a, bytes);
  mute_peer().take(bytes.data());
  const uint64_t cookie = pair_.a->cookie();
  ASSERT_TRUE(release(cookie, region).ok());
  EXPECT_TRUE(pair_.wait(*pair_.a, cookie).status.ok());
}

TEST_F(EngineWaits, ClosingAnswersThem) {
  const std::vector<uint64_t> waiting =
      submit_all([&](uint64_t cookie, RegionId region) { return release(cookie, region); });
  const uint64_t close = pair_.a->cookie();
  ASSERT_TRUE(pair_.a->engine->submit_close(close, true).ok());
  EXPECT_TRUE(pair_.wait(*pair_.a, close).status.ok());
  EXPECT_EQ(done(waiting), kHeld);
}

TEST_F(EngineWaits, NobodyWaitsBehindMemoryThatItsOwnerHasNotShownYet) {
  Unshown write(pair_);
  ASSERT_TRUE(pair_.until([] { return mute_peer().was_asked(); }));
  expect_others_go_on({write.cookie});
  mute_peer().go();
  EXPECT_TRUE(write.status().ok());
  EXPECT_TRUE(write.arrived());
}

TEST_F(EngineWaits, WhoWaitsForMemoryToBeShownLearnsThatItsOwnerIsGone) {
  Unshown write(pair_);
  ASSERT_TRUE(pair_.until([] { return mute_peer().was_asked(); }));
  expect_others_go_on({write.cookie});
  pair_.b.reset();
  EXPECT_EQ(write.status().code, StatusCode::kPeerDead);
}

TEST(EngineWaitsForMemory, AWriteToMemoryThatIsNeverShownEndsWithTheReason) {
  EngineConfig config = muted();
  config.connect_deadline_ns = 200'000'000;
  Pair pair(config);
  Unshown write(pair);
  EXPECT_EQ(write.status().code, StatusCode::kTimeout);
  const std::string why = pair.a->engine->reason(write.cookie);
  EXPECT_NE(why.find("has not shown the memory of the key within 200 ms"), std::string::npos) << why;
  EXPECT_FALSE(write.arrived());
  mute_peer().go();
}

// Nor for a write that the worker has not taken up when the program closes.
TEST(EngineWaitsForMemory, ClosingDoesNotWaitForMemoryToBeShown) {
  EngineConfig config = muted();
  config.drain_deadline_ns = kEndlessNs;
  for (int round = 0; round < 20; ++round) {
    Pair pair(config);
    Unshown write(pair);
    const uint64_t close = pair.a->cookie();
    ASSERT_TRUE(pair.a->engine->submit_close(close, true).ok());
    EXPECT_TRUE(pair.wait(*pair.a, close).status.ok());
    EXPECT_EQ(write.status().code, StatusCode::kCancelled);
    pair.a.reset();  // with the job that would have looked again
    mute_peer().go();
  }
}

}  // namespace
}  // namespace asyncfabric::testing
