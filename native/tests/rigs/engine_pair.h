// engine_pair.h: two engines in one process, joined over a rail of the test's choice, driven by hand (manual polling) or by their own
// workers. Everything waits on conditions with a deadline; nothing sleeps.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "asyncfabric/engine.h"
#include "base/clock.h"
#include "loopback_rail.h"
#include "provider/catalog.h"

namespace asyncfabric::testing {

inline void add_loopback() {
  static const bool once = [] {
    add_provider("loopback", open_loopback_rail);
    return true;
  }();
  (void)once;
}

inline RailSpec plain() { return {"loopback", "", {}}; }

struct Party {
  std::unique_ptr<Engine> engine;
  std::map<uint64_t, Completion> done;  // by cookie
  std::vector<Completion> others;       // cookie 0
  uint64_t next_cookie = 1;

  explicit Party(const EngineConfig& config) {
    std::string detail;
    const Status status = Engine::open(config, &engine, &detail);
    EXPECT_TRUE(status.ok()) << detail;
  }
  uint64_t cookie() { return next_cookie++; }
  void take() {
    Completion batch[64];
    while (const size_t count = engine->poll(batch, 64))
      for (size_t i = 0; i < count; ++i)
        if (batch[i].cookie == 0)
          others.push_back(batch[i]);
        else
          done[batch[i].cookie] = batch[i];
  }
};

struct Pair {
  EngineConfig config;
  std::unique_ptr<Party> a, b;

  explicit Pair(EngineConfig with, size_t rails_a = 1, size_t rails_b = 1) : config(std::move(with)) {
    add_loopback();
    const RailSpec spec = config.rails.at(0);
    EngineConfig config_a = config, config_b = config;
    if (config.rails.size() == 1) {  // several rails are taken as they are, for both
      config_a.rails.assign(rails_a, spec);
      config_b.rails.assign(rails_b, spec);
    }
    a = std::make_unique<Party>(config_a);
    b = std::make_unique<Party>(config_b);
  }

  static EngineConfig manual(RailSpec rail) {
    EngineConfig config;
    config.rails = {std::move(rail)};
    config.polling = PollingMode::kManual;
    config.drain_deadline_ns = 200'000'000;
    return config;
  }

  void turn() {
    for (Party* party : {a.get(), b.get()}) {
      if (party == nullptr) continue;
      if (config.polling == PollingMode::kManual) party->engine->step();
      party->take();
    }
  }

  template <class Condition>
  ::testing::AssertionResult until(Condition condition, uint64_t seconds = 30) {
    const uint64_t deadline = now_ns() + seconds * 1'000'000'000;
    while (!condition()) {
      if (now_ns() > deadline) return ::testing::AssertionFailure() << "condition not reached in " << seconds << " s";
      turn();
    }
    return ::testing::AssertionSuccess();
  }

  Completion wait(Party& party, uint64_t cookie) {
    EXPECT_TRUE(until([&] { return party.done.contains(cookie); })) << "cookie " << cookie;
    return party.done[cookie];
  }

  PeerId connect(Party& from, Party& to) {
    const uint64_t cookie = from.cookie();
    EXPECT_TRUE(from.engine->submit_connect(cookie, to.engine->address()).ok());
    const Completion done = wait(from, cookie);
    EXPECT_TRUE(done.status.ok());
    return done.value;
  }

  // Opens the counter of an imm as soon as its peers have confirmed that the last one is closed.
  CounterId open_counter(Party& party, int64_t imm) {
    CounterId counter = 0;
    uint32_t taken = 0;
    EXPECT_TRUE(until([&] { return party.engine->open_counter(imm, &counter, &taken).ok(); })) << "imm " << imm;
    return counter;
  }

  RegionId add_region(Party& party, std::vector<uint8_t>& bytes, uint32_t access = 3) {
    const uint64_t cookie = party.cookie();
    EXPECT_TRUE(party.engine->submit_register(cookie, bytes.data(), bytes.size(), kHostDevice, access).ok());
    const Completion done = wait(party, cookie);
    EXPECT_TRUE(done.status.ok());
    return done.value;
  }

  KeyId give_key(Party& from, RegionId region, uint64_t length, Party& to, uint32_t access = 3) {
    std::string bytes;
    EXPECT_TRUE(from.engine->region_key(region, access, 0, length, false, &bytes).ok());
    KeyId key = 0;
    KeyInfo info;
    EXPECT_TRUE(to.engine->open_key(bytes, &key, &info).ok());
    return key;
  }
};

}  // namespace asyncfabric::testing
