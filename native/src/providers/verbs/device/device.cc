// device.cc: the choice of a device and its port. A named device that cannot be used is an error with the reason; without a name the
// first device that can be used is taken.
#include "providers/verbs/device/device.h"

#include <fcntl.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "providers/verbs/device/errors.h"

namespace asyncfabric::verbs {
namespace {

constexpr uint8_t kHopLimit = 64;

ibv_mtu mtu_of(uint32_t bytes) { return static_cast<ibv_mtu>(std::bit_width(bytes) - 8); }  // 256 -> 1

double lane_gbits(uint8_t speed) {
  switch (speed) {
    case 1: return 2.5;
    case 2: return 5;
    case 4:
    case 8: return 10;
    case 16: return 14;
    case 32: return 25;
    case 64: return 50;
    case 128: return 100;
    default: return 0;
  }
}

double lane_count(uint8_t width) {
  switch (width) {
    case 1: return 1;
    case 2: return 4;
    case 4: return 8;
    case 8: return 12;
    case 16: return 2;
    default: return 0;
  }
}

void keep_nonblocking(int fd) { (void)fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

}  // namespace

Status Device::refuse(const std::string& why, int error, std::string* detail) const {
  *detail = "verbs: " + name_ + ": " + why;
  if (error != 0) *detail += std::string(" (") + std::strerror(error) + ")";
  return {StatusCode::kNoProvider, error};
}

Status Device::open(const Library& library, const Options& options, std::unique_ptr<Device>* out, std::string* detail) {
  int count = 0;
  ibv_device** list = library.ibv_get_device_list(&count);
  if (list == nullptr || count == 0) {
    if (list != nullptr) library.ibv_free_device_list(list);
    *detail = "verbs: this machine has no RDMA device (" + library.path + " found none under " + options.sysfs +
              "/infiniband)";
    return {StatusCode::kNoProvider, ENODEV};
  }
  Status status{StatusCode::kNoProvider, ENODEV};
  std::string names;
  for (int i = 0; i < count; ++i) {
    const std::string name = list[i]->name;
    names += (names.empty() ? "" : ", ") + name;
    if (!options.device.empty() && name != options.device) continue;
    std::unique_ptr<Device> device(new Device(library, options));
    device->name_ = name;
    std::string why;
    status = device->open_context(list[i], &why);
    if (status.ok()) {
      *out = std::move(device);
      break;
    }
    *detail += (detail->empty() ? "" : "; ") + why;
  }
  library.ibv_free_device_list(list);
  if (detail->empty() && !status.ok()) *detail = "verbs: no device '" + options.device + "' here; there are: " + names;
  if (status.ok()) detail->clear();
  return status;
}

Status Device::open_context(ibv_device* device, std::string* detail) {
  if (device->transport_type == IBV_TRANSPORT_IWARP || device->node_type == IBV_NODE_RNIC)
    return refuse("iWARP has no writes with immediates, so arrivals could not be counted", 0, detail);
  context_ = own(library_.ibv_open_device(device), library_.ibv_close_device);
  if (!context_) return refuse("the device cannot be opened; are its /dev/infiniband files readable?", errno, detail);
  if (const int error = library_.ibv_query_device(context_.get(), &limits_); error != 0)
    return refuse("ibv_query_device failed", error, detail);
  if (const Status status = choose_port(detail); !status.ok()) return status;
  if (!choose_gid(options_.sysfs, name_, port_, static_cast<uint32_t>(attributes_.gid_tbl_len), ethernet(),
                  options_.gid, &gid_, detail)) {
    *detail = "verbs: " + *detail;
    return {StatusCode::kNoProvider, ENODEV};
  }
  gid_index_.store(gid_.index, std::memory_order_relaxed);
  gbits_per_s_ = rate_of_port(options_.sysfs, name_, port_);
  if (gbits_per_s_ <= 0) gbits_per_s_ = lane_gbits(attributes_.active_speed) * lane_count(attributes_.active_width);
  if (options_.pkey >= attributes_.pkey_tbl_len)
    return refuse("there is no pkey at index " + std::to_string(options_.pkey), 0, detail);
  mtu_ = std::min(attributes_.active_mtu, mtu_of(options_.mtu));
  pd_ = own(library_.ibv_alloc_pd(context_.get()), library_.ibv_dealloc_pd);
  if (!pd_) return refuse("ibv_alloc_pd failed", errno, detail);
  keep_nonblocking(context_->async_fd);
  return {};
}

Status Device::choose_port(std::string* detail) {
  const uint8_t first = options_.port != 0 ? static_cast<uint8_t>(options_.port) : 1;
  const uint8_t last = options_.port != 0 ? first : limits_.phys_port_cnt;
  if (last > limits_.phys_port_cnt)
    return refuse("there is no port " + std::to_string(last) + "; it has " + std::to_string(limits_.phys_port_cnt), 0,
                  detail);
  int error = 0;
  for (uint8_t port = first; port <= last; ++port) {
    error = query_port(context_.get(), port, &attributes_);
    if (error != 0 || attributes_.state != IBV_PORT_ACTIVE) continue;
    port_ = port;
    return {};
  }
  return refuse(options_.port != 0 ? "port " + std::to_string(options_.port) + " is not active" : "no port is active",
                error, detail);
}

bool Device::has_its_address() {
  ibv_port_attr now;
  if (query_port(context_.get(), port_, &now) != 0) return false;
  if (!ethernet() && now.lid != attributes_.lid) return false;
  GidWish same;
  same.by_gid = true;
  same.gid = gid_.gid;
  same.type = gid_.type;
  GidChoice found;
  std::string why;
  if (!choose_gid(options_.sysfs, name_, port_, static_cast<uint32_t>(now.gid_tbl_len), ethernet(), same, &found, &why))
    return false;
  gid_index_.store(found.index, std::memory_order_relaxed);
  return true;
}

std::string Device::description() const {
  const std::lock_guard lock(mutex_);
  return "port " + std::to_string(port_) + ", GID " + gid_.text() + ", firmware " + limits_.fw_ver;
}

void Device::close() {
  pd_.reset();
  context_.reset();
}

Status Device::reopen(std::string* detail) {
  Options same = options_;
  same.device = name_;
  same.port = port_;
  std::unique_ptr<Device> fresh;
  if (const Status status = open(library_, same, &fresh, detail); !status.ok()) return status;
  const std::lock_guard lock(mutex_);
  context_ = std::move(fresh->context_);
  pd_ = std::move(fresh->pd_);
  limits_ = fresh->limits_;
  attributes_ = fresh->attributes_;
  gid_ = fresh->gid_;
  gid_index_.store(gid_.index, std::memory_order_relaxed);
  mtu_ = fresh->mtu_;
  return {};
}

ibv_ah_attr Device::path_to(const RailAddress& remote) const {
  ibv_ah_attr path{};
  path.port_num = port_;
  path.sl = static_cast<uint8_t>(options_.service_level);
  path.dlid = remote.lid;
  // A global header where the link demands it (RoCE) or where it was asked for; within one InfiniBand subnet the LID is enough.
  path.is_global = ethernet() || options_.gid.asked() ? 1 : 0;
  if (path.is_global != 0) {
    std::memcpy(path.grh.dgid.raw, remote.gid.data(), remote.gid.size());
    path.grh.sgid_index = static_cast<uint8_t>(gid_index_.load(std::memory_order_relaxed));
    path.grh.hop_limit = kHopLimit;
    path.grh.traffic_class = static_cast<uint8_t>(options_.traffic_class);
  }
  return path;
}

}  // namespace asyncfabric::verbs
