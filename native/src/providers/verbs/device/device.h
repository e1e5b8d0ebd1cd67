// device.h: one opened device: context, protection domain, port, GID, and what they can do. Chosen and opened on the thread that
// opens the rail. Afterwards the service thread alone changes it: where the GID stands, and all of it when a failed device is opened again;
// then no other thread has anything in it. Registrations keep it alive.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "asyncfabric/status.h"
#include "providers/verbs/device/library.h"
#include "providers/verbs/device/owned.h"
#include "providers/verbs/options.h"
#include "providers/verbs/peers/wire.h"

namespace asyncfabric::verbs {

// Why a rail is down.
enum class Trouble : uint8_t {
  kNone,
  kPort,     // its port is not active
  kAddress,  // the GID or LID that peers know is not the port's any more
  kDevice,   // the device, or a queue of the rail, failed; it is opened again
};

class Device {
 public:
  static Status open(const Library& library, const Options& options, std::unique_ptr<Device>* out, std::string* detail);

  const Library& library() const { return library_; }
  const Options& options() const { return options_; }
  ibv_context* context() const { return context_.get(); }
  ibv_pd* pd() const { return pd_.get(); }
  const ibv_device_attr& limits() const { return limits_; }
  const std::string& name() const { return name_; }
  std::string description() const;  // its port, GID and firmware; any thread
  uint8_t port() const { return port_; }
  const GidChoice& gid() const { return gid_; }
  uint16_t lid() const { return attributes_.lid; }
  bool ethernet() const { return attributes_.link_layer == IBV_LINK_LAYER_ETHERNET; }
  ibv_mtu mtu() const { return mtu_; }
  uint64_t max_message_bytes() const { return attributes_.max_msg_sz; }
  double gbits_per_s() const { return gbits_per_s_; }  // when it was opened first

  // Service thread. Nothing of ours may be in the device when it closes. Opened again it is the same port of the same device, as it
  // is then.
  void close();
  Status reopen(std::string* detail);

  // Service thread. Looks again for the address that peers know; true: the port has it. Its GID may have moved in the table.
  bool has_its_address();
  void set_trouble(Trouble trouble) { trouble_.store(trouble, std::memory_order_relaxed); }
  Trouble trouble() const { return trouble_.load(std::memory_order_relaxed); }

  // How packets reach the port behind `remote`.
  ibv_ah_attr path_to(const RailAddress& remote) const;

 private:
  Device(const Library& library, const Options& options) : library_(library), options_(options) {}
  Status open_context(ibv_device* device, std::string* detail);
  Status choose_port(std::string* detail);
  Status refuse(const std::string& why, int error, std::string* detail) const;

  const Library& library_;
  const Options options_;
  std::string name_;
  mutable std::mutex mutex_;  // what description() reads
  Owned<ibv_context> context_;
  Owned<ibv_pd> pd_;  // after context_, so it goes first
  ibv_device_attr limits_{};
  ibv_port_attr attributes_{};
  GidChoice gid_;
  std::atomic<uint32_t> gid_index_{0};            // relaxed: where gid_ stands in the table now
  std::atomic<Trouble> trouble_{Trouble::kNone};  // relaxed: the service thread stores, info() loads
  double gbits_per_s_ = 0;
  uint8_t port_ = 0;
  ibv_mtu mtu_ = IBV_MTU_256;
};

}  // namespace asyncfabric::verbs
