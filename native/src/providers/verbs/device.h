// device.h: one opened device: context, protection domain, port, GID, and what they can do. Chosen and opened on the thread that
// opens the rail, constant afterwards, so any thread may read it. Registrations keep it alive.
#pragma once

#include <memory>
#include <string>

#include "asyncfabric/status.h"
#include "providers/verbs/library.h"
#include "providers/verbs/options.h"
#include "providers/verbs/owned.h"
#include "providers/verbs/wire.h"

namespace asyncfabric::verbs {

class Device {
 public:
  static Status open(const Library& library, const Options& options, std::unique_ptr<Device>* out, std::string* detail);

  const Library& library() const { return library_; }
  const Options& options() const { return options_; }
  ibv_context* context() const { return context_.get(); }
  ibv_pd* pd() const { return pd_.get(); }
  const ibv_device_attr& limits() const { return limits_; }
  const std::string& name() const { return name_; }
  uint8_t port() const { return port_; }
  const GidChoice& gid() const { return gid_; }
  uint16_t lid() const { return attributes_.lid; }
  bool ethernet() const { return attributes_.link_layer == IBV_LINK_LAYER_ETHERNET; }
  ibv_mtu mtu() const { return mtu_; }
  uint64_t max_message_bytes() const { return attributes_.max_msg_sz; }
  double gbits_per_s() const;

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
  Owned<ibv_context> context_;
  Owned<ibv_pd> pd_;  // after context_, so it goes first
  ibv_device_attr limits_{};
  ibv_port_attr attributes_{};
  GidChoice gid_;
  uint8_t port_ = 0;
  ibv_mtu mtu_ = IBV_MTU_256;
};

}  // namespace asyncfabric::verbs
