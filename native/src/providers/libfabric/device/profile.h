// profile.h: what differs between the uses of libfabric: one Profile per value of RailSpec::provider (tcp, efa, ofi-verbs).
// A profile chooses libfabric providers and shapes the hints; rail, memory and address code is shared by all of them.
// Used only while a rail opens, on the opening thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "asyncfabric/status.h"
#include "providers/libfabric/device/library.h"

namespace asyncfabric::libfabric {

struct Profile {
  std::string_view name;
  std::vector<const char*> providers;     // libfabric provider names, best first
  bool binds_address = false;             // an IP address is the source address
  const char* default_address = nullptr;  // bound when neither address nor device was asked for
  bool over_sockets = false;              // names are of listening TCP sockets: who refuses to be connected to is gone
  bool wait_fd = false;                   // ask for a CQ that can be slept on
  bool endpoint_per_peer = false;  // sends to each peer leave from an endpoint of their own: closing it is the only
                                   // way to flush, and one dead peer cannot block the others
  bool acknowledged = false;       // completions wait for the target's word: a broken stream would lose what only left
  uint64_t most_open_bytes =
      0;                    // that libfabric holds for one peer at a time, so that heartbeats need not stand behind
                            // more, whatever waits; 0: any number
  uint64_t ask_every = 16;  // where that word must be asked for: once in so many requests; 0: each completion is it
  bool fence_on_release = false;           // a write can arrive in pieces after its key was checked: see fence.cc
  uint32_t eager_posts = 0;                // posts handed to the NIC at once by post(); 0: all
  uint32_t posts_per_pass = 0;             // and by each poll() afterwards
  size_t name_bytes = 0;                   // exact length of an endpoint name, 0: by the address format
  bool gpu_memory = false;                 // ask for FI_HMEM, where the provider has it
  bool keys_may_be_cached = false;         // the library may keep a closed registration alive: see cached_keys.h
  bool rebuilds_after_failure = false;     // a failed request ends its queue pair, and the library never makes another
  bool ends_a_process_that_forks = false;  // unless Library::survives_fork
  uint64_t settle_ns = 0;                  // how long a closing rail waits for both ends to read what has arrived
  void (*shape_hints)(fi_info& hints) = nullptr;
  // What a failed request met, from FI_EIO and the provider's own number; null: the library's error shows it.
  Status (*name_failure)(int error, int provider_error) = nullptr;
  // Options of the endpoint before it is enabled; false: `detail` names the one that was refused. May take capabilities out of `info`.
  bool (*configure_endpoint)(fid_ep* endpoint, fi_info& info, std::string* detail) = nullptr;
  // What the enabled endpoint turns out to do; false: `detail` names what it must not.
  bool (*accept_endpoint)(fid_ep* endpoint, const Library& library, std::string* detail) = nullptr;
};

const Profile& tcp_profile();
const Profile& efa_profile();
const Profile& verbs_profile();
const Profile* find_profile(std::string_view name);

// What a caller may ask for; parsed from RailSpec by open.cc, filled by hand by the bare loop of the bench.
struct Selection {
  std::string provider;  // option prov=: exactly this libfabric provider
  std::string address;   // option address=: IPv4 or IPv6 address to bind
  std::string device;    // interface or domain name
};

// Owns an fi_info; the first one that fits profile and selection.
class Info {
 public:
  Info() = default;
  Info(const Library& library, fi_info* info) : library_(&library), info_(info) {}
  ~Info() { reset(); }
  Info(Info&& other) noexcept : library_(other.library_), info_(other.info_) { other.info_ = nullptr; }
  Info& operator=(Info&& other) noexcept {
    if (this != &other) {
      reset();
      library_ = other.library_;
      info_ = other.info_;
      other.info_ = nullptr;
    }
    return *this;
  }
  fi_info* get() const { return info_; }
  fi_info* operator->() const { return info_; }
  explicit operator bool() const { return info_ != nullptr; }

 private:
  void reset() {
    if (info_ != nullptr) library_->fi_freeinfo(info_);
    info_ = nullptr;
  }
  const Library* library_ = nullptr;
  fi_info* info_ = nullptr;
};

Info select_info(const Library& library, const Profile& profile, const Selection& selection, std::string* detail);

}  // namespace asyncfabric::libfabric
