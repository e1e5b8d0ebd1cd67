// verbs_rig.h: rail_rig.h for verbs rails.
// Tests need real RDMA devices (`make rxe` brings soft-RoCE ones in a VM) and skip loudly without.
#pragma once

#include <dirent.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "providers/verbs/rail.h"
#include "rigs/rail_rig.h"

namespace asyncfabric {

Status open_verbs_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail);

namespace verbs_rig {

using Words = std::vector<std::pair<std::string, std::string>>;

using rail_rig::fill;
using rail_rig::kPatience;
using rail_rig::kSecond;
using rail_rig::Link;
using rail_rig::pattern;
using rail_rig::pump_until;

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

inline RailSpec spec_of(const std::string& device, Words options) {
  RailSpec spec;
  spec.provider = "verbs";
  spec.device = device;
  spec.options = std::move(options);
  return spec;
}

struct Side : rail_rig::Side {
  explicit Side(const std::string& device, Words options = {}, size_t bytes = 1 << 20,
                uint32_t access = kAccessRemoteWrite | kAccessRemoteRead, Opener opener = open_verbs_rail)
      : rail_rig::Side(opener, spec_of(device, std::move(options)), bytes, access) {}

  void take_own(RailEventKind kind) override {
    switch (kind) {
      case RailEventKind::kRailDown: ++downs; break;
      case RailEventKind::kRailUp: ++ups; break;
      case RailEventKind::kPathDown:
        path_down = true;
        ++path_downs;
        break;
      case RailEventKind::kPathUp: path_down = false; break;
      default: ADD_FAILURE() << "unexpected event";
    }
  }

  verbs::Figures figures() const { return static_cast<verbs::VerbsRail&>(*rail).figures(); }
  size_t failed() const {
    return static_cast<size_t>(
        std::count_if(done.begin(), done.end(), [](const auto& each) { return !each.second.ok(); }));
  }

  size_t downs = 0;
  size_t ups = 0;
  size_t path_downs = 0;
  bool path_down = false;
};

}  // namespace verbs_rig
}  // namespace asyncfabric
