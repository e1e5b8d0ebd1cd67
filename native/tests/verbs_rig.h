// verbs_rig.h: rails driven by hand for the verbs tests: a Side is one rail with a region, a Link is a connection from one to another.
// Tests need real RDMA devices (`make rxe` brings soft-RoCE ones in a VM) and skip loudly without. Everything waits on a condition, with a
// deadline that only a bug reaches.
#pragma once

#include <dirent.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "asyncfabric/types.h"
#include "base/clock.h"
#include "provider/provider.h"
#include "providers/verbs/rail.h"

namespace asyncfabric {

Status open_verbs_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail);

namespace verbs_rig {

using Words = std::vector<std::pair<std::string, std::string>>;

constexpr uint64_t kSecond = 1'000'000'000;
constexpr uint64_t kPatience = 20 * kSecond;

inline std::vector<std::string> devices() {
  std::vector<std::string> names;
  DIR* directory = opendir("/sys/class/infiniband");
  if (directory == nullptr) return names;
  while (const dirent* entry = readdir(directory))
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  closedir(directory);
  std::sort(names.begin(), names.end());
  return names;
}

// Two devices that reach each other: the last two (rxe1 and rxe2 are the ends of one cable), or one that reaches itself.
inline std::string device_a() {
  const std::vector<std::string> names = devices();
  return names.size() < 2 ? names.at(0) : names[names.size() - 2];
}
inline std::string device_b() { return devices().back(); }

#define NEED_VERBS()                \
  if (verbs_rig::devices().empty()) \
  GTEST_SKIP() << "NO RDMA DEVICE HERE: verbs is tested by `make rxe`, in a VM with soft-RoCE"

struct Side {
  explicit Side(const std::string& device, Words options = {}, size_t bytes = 1 << 20,
                uint32_t access = kAccessRemoteWrite | kAccessRemoteRead)
      : region(bytes) {
    RailSpec spec;
    spec.provider = "verbs";
    spec.device = device;
    spec.options = std::move(options);
    std::string detail;
    const Status status = open_verbs_rail(spec, &rail, &detail);
    if (!status.ok()) {
      ADD_FAILURE() << detail;
      std::abort();  // nothing below can run without a rail
    }
    EXPECT_TRUE(rail->register_memory({region.data(), region.size(), kHostDevice, -1, access}, &memory, &key).ok());
  }

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
        break;
      case RailEventKind::kPeerLost: lost.emplace_back(event.peer, event.status); break;
      case RailEventKind::kRailDown: ++downs; break;
      case RailEventKind::kRailUp: ++ups; break;
      case RailEventKind::kPathDown: path_down = true; break;
      case RailEventKind::kPathUp: path_down = false; break;
    }
  }

  verbs::Figures figures() const { return static_cast<verbs::VerbsRail&>(*rail).figures(); }
  size_t failed() const {
    return static_cast<size_t>(
        std::count_if(done.begin(), done.end(), [](const auto& each) { return !each.second.ok(); }));
  }

  std::vector<uint8_t> region;
  std::unique_ptr<Rail> rail;
  std::unique_ptr<LocalMemory> memory;
  std::string key;
  std::vector<std::pair<uint64_t, Status>> done;
  std::vector<uint32_t> imms;
  std::vector<std::string> messages;
  std::vector<std::pair<RailPeer*, Status>> lost;
  size_t downs = 0;
  size_t ups = 0;
  bool path_down = false;
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
    if (status.ok()) { EXPECT_TRUE(from.rail->attach(*peer, key, &remote).ok()); }
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

}  // namespace verbs_rig
}  // namespace asyncfabric
