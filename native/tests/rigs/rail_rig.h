// rail_rig.h: rails driven by hand for the tests of providers: a Side is one rail with a region and what its polls brought, a Link is a
// connection from one to another. Everything waits on a condition, with a deadline that only a bug reaches.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "asyncfabric/types.h"
#include "base/clock.h"
#include "provider/provider.h"

namespace asyncfabric::rail_rig {

constexpr uint64_t kSecond = 1'000'000'000;
constexpr uint64_t kPatience = 20 * kSecond;

struct Side {
  using Opener = Status (*)(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail);

  Side(Opener opener, const RailSpec& spec, size_t bytes, uint32_t access) : region(bytes) {
    std::string detail;
    const Status status = opener(spec, &rail, &detail);
    if (!status.ok()) {
      ADD_FAILURE() << spec.provider << ": " << detail;
      std::abort();  // nothing below can run without a rail
    }
    EXPECT_TRUE(rail->register_memory({region.data(), region.size(), kHostDevice, -1, access}, &memory, &key).ok());
  }
  virtual ~Side() = default;
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  void pump() {
    std::array<RailEvent, 64> events;
    const size_t count = rail->poll(events);
    for (size_t i = 0; i < count; ++i) take(events[i]);
  }

  void take(const RailEvent& event) {
    switch (event.kind) {
      case RailEventKind::kDone: done.emplace_back(event.tag, event.status); break;
      case RailEventKind::kImmediate:
        if (on_imm) on_imm(event.imm);
        imms.push_back(event.imm);
        break;
      case RailEventKind::kMessage:
        messages.emplace_back(reinterpret_cast<const char*>(event.data), event.length);
        connections.push_back(event.connection);
        break;
      case RailEventKind::kPeerLost: lost.emplace_back(event.peer, event.status); break;
      default: take_own(event.kind);
    }
  }

  // Events that only some rails have.
  virtual void take_own(RailEventKind) { ADD_FAILURE() << "unexpected event"; }

  std::vector<uint8_t> region;
  std::unique_ptr<Rail> rail;
  std::unique_ptr<LocalMemory> memory;
  std::string key;
  std::vector<std::pair<uint64_t, Status>> done;
  std::vector<uint32_t> imms;
  std::vector<std::string> messages;
  std::vector<uint64_t> connections;  // that they came over
  std::vector<std::pair<RailPeer*, Status>> lost;
  std::function<void(uint32_t)> on_imm;
};

// Polls all sides until the condition holds; false: patience ran out.
inline bool pump_until(std::initializer_list<Side*> sides, const std::function<bool()>& condition,
                       uint64_t patience = kPatience) {
  const uint64_t deadline = now_ns() + patience;
  while (!condition()) {
    for (Side* side : sides) side->pump();
    if (now_ns() > deadline) return false;
  }
  return true;
}

struct Link {  // from one side to another
  Link(Side& from, const std::string& address, const std::string& key) : from_(from) {
    const Status status = from.rail->connect(address, kPatience, &peer);
    EXPECT_TRUE(status.ok()) << status_text(status.code);
    if (status.ok()) { EXPECT_TRUE(from.rail->attach(*peer, key, kPatience, &remote).ok()); }
  }
  Link(Side& from, Side& to) : Link(from, to.rail->address(), to.key) {}

  WorkRequest write(uint64_t from_offset, uint64_t to_offset, uint64_t length, uint64_t tag) const {
    WorkRequest request;
    request.peer = peer.get();
    request.local = from_.memory.get();
    request.remote = remote.get();
    request.address = from_.region.data() + from_offset;
    request.remote_offset = to_offset;
    request.length = length;
    request.tag = tag;
    return request;
  }
  WorkRequest write_imm(uint64_t from_offset, uint64_t to_offset, uint64_t length, uint64_t tag, uint32_t imm) const {
    WorkRequest request = write(from_offset, to_offset, length, tag);
    request.has_imm = true;
    request.imm = imm;
    return request;
  }
  WorkRequest signal(uint64_t tag, uint32_t imm) const {
    WorkRequest request;
    request.peer = peer.get();
    request.has_imm = true;
    request.imm = imm;
    request.tag = tag;
    return request;
  }
  WorkRequest message(const std::string& text, uint64_t tag) const {
    WorkRequest request;
    request.kind = WorkKind::kSend;
    request.peer = peer.get();
    request.address = text.data();
    request.length = text.size();
    request.tag = tag;
    return request;
  }
  // Posts one request, pumping while the rail is busy.
  void post(const WorkRequest& request, std::initializer_list<Side*> sides) {
    EXPECT_TRUE(pump_until(sides, [&] {
      const PostResult result = from_.rail->post({&request, 1});
      EXPECT_TRUE(result.accepted == 1 || result.status.code == StatusCode::kBusy);
      return result.accepted == 1;
    }));
  }

  Side& from_;
  std::unique_ptr<RailPeer> peer;
  std::unique_ptr<RemoteMemory> remote;
};

inline uint8_t pattern(uint64_t i, uint64_t seed) {
  uint64_t x = (i + seed * 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
  return static_cast<uint8_t>(x >> 56);
}
inline void fill(std::vector<uint8_t>& bytes, uint64_t seed) {
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = pattern(i, seed);
}
// Each byte equals the one before it: memcmp, because a loop over MiB takes minutes under a sanitizer.
inline bool untouched(const std::vector<uint8_t>& bytes, uint64_t begin, uint64_t end, uint8_t value = 0xee) {
  if (begin == end) return true;
  return bytes[begin] == value && std::memcmp(bytes.data() + begin, bytes.data() + begin + 1, end - begin - 1) == 0;
}

}  // namespace asyncfabric::rail_rig
