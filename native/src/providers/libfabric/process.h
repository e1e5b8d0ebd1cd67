// process.h: processes of this host behind shared-memory endpoints: names that say whose they are, whether the owner lives,
// and the removal of segments that a killed process left in /dev/shm.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace asyncfabric::libfabric {

// "fi_shm://asyncfabric_<pid>_<pid namespace>_<random>": libfabric appends user and endpoint number.
std::string make_shm_name();

// Unlinks segments of our naming whose process is gone. Foreign names and other pid namespaces are left alone.
void sweep_shm_segments();

// The segment behind an endpoint name, as /dev/shm lists it; empty for names that are not ours. Then its process, or 0.
std::string_view shm_segment_name(std::string_view endpoint_name);
pid_t shm_owner(std::string_view segment);
std::vector<std::string> shm_segments_of(pid_t pid);

// Whether a shm endpoint name belongs to this process.
bool is_own_shm_name(std::string_view endpoint_name);

// Watches the process of a shm endpoint name; sees its end within one call.
class ProcessWatch {
 public:
  static std::unique_ptr<ProcessWatch> open(std::string_view endpoint_name);  // null: cannot be watched from here
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;
  bool ended() const;

 private:
  explicit ProcessWatch(int pidfd) : pidfd_(pidfd) {}
  int pidfd_;
};

}  // namespace asyncfabric::libfabric
