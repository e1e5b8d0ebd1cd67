// libfabric_pair.h: rail_rig.h for the rails of libfabric, and which profiles of it the tests run over.
#pragma once

#include <atomic>
#include <thread>

#include "rigs/rail_rig.h"

namespace asyncfabric {

Status open_libfabric_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail);

namespace testing {

using rail_rig::fill;
using rail_rig::kPatience;
using rail_rig::kSecond;
using rail_rig::Link;
using rail_rig::pattern;
using rail_rig::pump_until;

inline RailSpec spec_of(const std::string& text) {  // "tcp" or "tcp prov=tcp;ofi_rxm"
  RailSpec spec;
  const size_t space = text.find(' ');
  spec.provider = text.substr(0, space);
  if (space == std::string::npos) return spec;
  const std::string option = text.substr(space + 1);
  const size_t equals = option.find('=');
  spec.options.emplace_back(option.substr(0, equals), option.substr(equals + 1));
  return spec;
}

// Every profile of libfabric that can be driven by hand. ofi-verbs needs an RDMA device: a NIC, or the machine of tests/rxe.
inline const auto kProfiles = ::testing::Values("tcp", "tcp prov=tcp;ofi_rxm", "ofi-verbs");

inline std::string name_of_profile(const std::string& text) {
  if (text == "ofi-verbs") return "verbs";
  return text.find(';') != std::string::npos ? "rxm" : text;
}

inline std::string missing(const RailSpec& spec) {  // why it cannot be opened here; "": it can
  if (spec.provider != "ofi-verbs") return "";
  std::unique_ptr<Rail> rail;
  std::string detail;
  const Status status = open_libfabric_rail(spec, &rail, &detail);
  return status.code == StatusCode::kNoProvider ? detail : "";
}

struct Side : rail_rig::Side {
  explicit Side(const RailSpec& spec, size_t bytes = 1 << 20, uint32_t access = kAccessRemoteWrite | kAccessRemoteRead)
      : rail_rig::Side(open_libfabric_rail, spec, bytes, access) {}
};

// Runs a control call of one side on a thread of its own, while the other one is pumped, as two processes would do.
template <typename Call>
Status while_pumping(Side& other, Call call) {
  Status status;
  std::atomic<bool> ended{false};  // partner: the load below
  std::thread control([&] {
    status = call();
    ended.store(true, std::memory_order_release);
  });
  EXPECT_TRUE(pump_until({&other}, [&] { return ended.load(std::memory_order_acquire); }));
  control.join();
  return status;
}

}  // namespace testing
}  // namespace asyncfabric
