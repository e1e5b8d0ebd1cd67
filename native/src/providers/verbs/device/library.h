// library.h: libibverbs opened with dlopen; this table is the only list of its symbols that we use. What posts and polls is
// reached through the tables of its objects (inline functions of its header). A library, once opened, stays open until the
// process ends: the drivers that it loads keep state of their own. Any thread; used by open_verbs_rail and by the bare loop.
#pragma once

#include <infiniband/verbs.h>

#include <string>

namespace asyncfabric::verbs {

#define ASYNCFABRIC_VERBS_SYMBOLS(X) \
  X(ibv_get_device_list)             \
  X(ibv_free_device_list)            \
  X(ibv_open_device)                 \
  X(ibv_close_device)                \
  X(ibv_query_device)                \
  X(ibv_query_pkey)                  \
  X(ibv_get_async_event)             \
  X(ibv_ack_async_event)             \
  X(ibv_alloc_pd)                    \
  X(ibv_dealloc_pd)                  \
  X(ibv_reg_mr_iova2)                \
  X(ibv_reg_dmabuf_mr)               \
  X(ibv_dereg_mr)                    \
  X(ibv_create_comp_channel)         \
  X(ibv_destroy_comp_channel)        \
  X(ibv_create_cq)                   \
  X(ibv_destroy_cq)                  \
  X(ibv_get_cq_event)                \
  X(ibv_ack_cq_events)               \
  X(ibv_create_srq)                  \
  X(ibv_modify_srq)                  \
  X(ibv_destroy_srq)                 \
  X(ibv_create_qp)                   \
  X(ibv_modify_qp)                   \
  X(ibv_destroy_qp)                  \
  X(ibv_create_ah)                   \
  X(ibv_destroy_ah)                  \
  X(ibv_wc_status_str)

struct Library {
#define X(symbol) decltype(&::symbol) symbol = nullptr;
  ASYNCFABRIC_VERBS_SYMBOLS(X)
#undef X
  std::string path;  // the file that was really loaded
};

// `name` = "" opens libibverbs.so.1 by the loader's own search. nullptr: `detail` is what to install.
const Library* open_library(const std::string& name, std::string* detail);

// ibv_query_port is a macro whose old path would need the library at link time.
int query_port(ibv_context* context, uint8_t port, ibv_port_attr* out);

}  // namespace asyncfabric::verbs
