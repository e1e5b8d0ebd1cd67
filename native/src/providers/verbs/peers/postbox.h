// postbox.h: the unreliable-datagram queue pair over which rails meet before they have a connection. In band, because it reaches exactly
// the ports that the data will use, on InfiniBand as on RoCE, needs no IP address, listener, firewall hole or port number, and its
// address fits into a few bytes; a TCP listener would need all of these, and on InfiniBand an IPoIB interface besides. The price: datagrams
// get lost, so whoever uses this repeats itself. Service thread.
#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "providers/verbs/device/device.h"

namespace asyncfabric::verbs {

class Postbox {
 public:
  static Status open(const Device& device, std::unique_ptr<Postbox>* out, std::string* detail);
  ~Postbox();

  uint32_t qpn() const { return qp_->qp_num; }
  uint32_t qkey() const { return qkey_; }
  int fd() const { return channel_->fd; }

  // Best effort: false when nothing left (no way there, or all slots under way).
  bool send(const RailAddress& to, std::string_view bytes);
  // Hands out what came. Arms the fd again before its last look, so that no datagram is slept over.
  void collect(const std::function<void(std::string_view)>& take);
  void forget_routes() { routes_old_ = true; }  // the port's GID moved: none leaves from the old index any more
  bool idle() const { return free_sends_.size() == kSends; }  // everything has left

 private:
  static constexpr size_t kReceives = 128;
  static constexpr size_t kSends = 64;

  struct Route {  // an address handle, kept for the next datagram to the same port
    Gid gid{};
    uint16_t lid = 0;
    Owned<ibv_ah> handle;
  };

  explicit Postbox(const Device& device) : device_(device) {}
  int make();
  int bring_up();
  void revive();
  bool post_receive(size_t slot);
  ibv_ah* route_to(const RailAddress& remote);
  size_t take_completions(const std::function<void(std::string_view)>& take);

  const Device& device_;
  uint32_t qkey_ = 0;
  bool stopped_ = false;
  bool routes_old_ = false;
  std::unique_ptr<uint8_t[]> bytes_;
  Owned<ibv_comp_channel> channel_;
  Owned<ibv_cq> cq_;
  Owned<ibv_mr> mr_;
  Owned<ibv_qp> qp_;
  std::vector<Route> routes_;  // newest last; the oldest goes when there are too many
  std::vector<size_t> free_sends_;
};

}  // namespace asyncfabric::verbs
