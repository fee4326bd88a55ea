#include "transports/ucx.h"

#include <doctest/doctest.h>

#include <cstdlib>

#include "base/error.h"
#include "layouts.h"

#if __has_include(<ucp/api/ucp.h>)
#include <ucp/api/ucp.h>

namespace ours = tensorwire::ucx;

SAME(ours::ContextParams, ucp_params_t, mask, field_mask);
SAME(ours::ContextParams, ucp_params_t, features, features);
SAME(ours::ContextParams, ucp_params_t, shared_by_threads, mt_workers_shared);
SAME(ours::ContextParams, ucp_params_t, name, name);
static_assert(sizeof(ours::ContextParams) == sizeof(ucp_params_t));
EQUAL(ours::ContextParams::kFeatures, UCP_PARAM_FIELD_FEATURES);
EQUAL(ours::ContextParams::kSharedByThreads, UCP_PARAM_FIELD_MT_WORKERS_SHARED);
EQUAL(ours::ContextParams::kName, UCP_PARAM_FIELD_NAME);
EQUAL(ours::kFeatureRma, UCP_FEATURE_RMA);
EQUAL(ours::kFeatureAm, UCP_FEATURE_AM);
EQUAL(ours::kFeatureWakeup, UCP_FEATURE_WAKEUP);

SAME(ours::WorkerParams, ucp_worker_params_t, mask, field_mask);
SAME(ours::WorkerParams, ucp_worker_params_t, threads, thread_mode);
static_assert(sizeof(ours::WorkerParams) == sizeof(ucp_worker_params_t));
EQUAL(ours::WorkerParams::kThreads, UCP_WORKER_PARAM_FIELD_THREAD_MODE);
EQUAL(ours::WorkerParams::kSerialized, UCS_THREAD_MODE_SERIALIZED);

SAME(ours::ListenerParams, ucp_listener_params_t, address, sockaddr);
SAME(ours::ListenerParams, ucp_listener_params_t, on_connection, conn_handler);
static_assert(sizeof(ours::ListenerParams) == sizeof(ucp_listener_params_t));
EQUAL(ours::ListenerParams::kAddress, UCP_LISTENER_PARAM_FIELD_SOCK_ADDR);
EQUAL(ours::ListenerParams::kOnConnection, UCP_LISTENER_PARAM_FIELD_CONN_HANDLER);
SAME(ours::ListenerAttributes, ucp_listener_attr_t, address, sockaddr);
EQUAL(ours::ListenerAttributes::kAddress, UCP_LISTENER_ATTR_FIELD_SOCKADDR);

SAME(ours::EndpointParams, ucp_ep_params_t, error_mode, err_mode);
SAME(ours::EndpointParams, ucp_ep_params_t, on_error, err_handler);
SAME(ours::EndpointParams, ucp_ep_params_t, flags, flags);
SAME(ours::EndpointParams, ucp_ep_params_t, address, sockaddr);
SAME(ours::EndpointParams, ucp_ep_params_t, connection, conn_request);
static_assert(sizeof(ours::EndpointParams) == sizeof(ucp_ep_params_t));
EQUAL(ours::EndpointParams::kErrorMode, UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
EQUAL(ours::EndpointParams::kOnError, UCP_EP_PARAM_FIELD_ERR_HANDLER);
EQUAL(ours::EndpointParams::kAddress, UCP_EP_PARAM_FIELD_SOCK_ADDR);
EQUAL(ours::EndpointParams::kFlags, UCP_EP_PARAM_FIELD_FLAGS);
EQUAL(ours::EndpointParams::kConnection, UCP_EP_PARAM_FIELD_CONN_REQUEST);
EQUAL(ours::EndpointParams::kPeerErrors, UCP_ERR_HANDLING_MODE_PEER);
EQUAL(ours::EndpointParams::kClientServer, UCP_EP_PARAMS_FLAGS_CLIENT_SERVER);

SAME(ours::MemoryParams, ucp_mem_map_params_t, address, address);
SAME(ours::MemoryParams, ucp_mem_map_params_t, length, length);
EQUAL(ours::MemoryParams::kAddress, UCP_MEM_MAP_PARAM_FIELD_ADDRESS);
EQUAL(ours::MemoryParams::kLength, UCP_MEM_MAP_PARAM_FIELD_LENGTH);

SAME(ours::RequestParams, ucp_request_param_t, mask, op_attr_mask);
SAME(ours::RequestParams, ucp_request_param_t, flags, flags);
SAME(ours::RequestParams, ucp_request_param_t, on_done, cb);
SAME(ours::RequestParams, ucp_request_param_t, user_data, user_data);
SAME(ours::RequestParams, ucp_request_param_t, memory, memh);
EQUAL(ours::RequestParams::kCallback, UCP_OP_ATTR_FIELD_CALLBACK);
EQUAL(ours::RequestParams::kUserData, UCP_OP_ATTR_FIELD_USER_DATA);
EQUAL(ours::RequestParams::kFlags, UCP_OP_ATTR_FIELD_FLAGS);
EQUAL(ours::RequestParams::kMemory, UCP_OP_ATTR_FIELD_MEMH);
EQUAL(ours::RequestParams::kForce, UCP_EP_CLOSE_FLAG_FORCE);
EQUAL(ours::RequestParams::kReply, UCP_AM_SEND_FLAG_REPLY);
EQUAL(ours::RequestParams::kEager, UCP_AM_SEND_FLAG_EAGER);

SAME(ours::MessageInfo, ucp_am_recv_param_t, mask, recv_attr);
SAME(ours::MessageInfo, ucp_am_recv_param_t, reply_to, reply_ep);
EQUAL(ours::MessageInfo::kReplyTo, UCP_AM_RECV_ATTR_FIELD_REPLY_EP);
SAME(ours::HandlerParams, ucp_am_handler_param_t, id, id);
SAME(ours::HandlerParams, ucp_am_handler_param_t, call, cb);
SAME(ours::HandlerParams, ucp_am_handler_param_t, argument, arg);
EQUAL(ours::HandlerParams::kId, UCP_AM_HANDLER_PARAM_FIELD_ID);
EQUAL(ours::HandlerParams::kCall, UCP_AM_HANDLER_PARAM_FIELD_CB);
EQUAL(ours::HandlerParams::kArgument, UCP_AM_HANDLER_PARAM_FIELD_ARG);

static_assert(sizeof(ours::Status) == sizeof(ucs_status_t));
EQUAL(ours::kInProgress, UCS_INPROGRESS);
EQUAL(ours::kNoMemory, UCS_ERR_NO_MEMORY);
EQUAL(ours::kInvalidParam, UCS_ERR_INVALID_PARAM);
EQUAL(ours::kInvalidAddress, UCS_ERR_INVALID_ADDR);
EQUAL(ours::kNotImplemented, UCS_ERR_NOT_IMPLEMENTED);
EQUAL(ours::kUnsupported, UCS_ERR_UNSUPPORTED);
EQUAL(ours::kNoDevice, UCS_ERR_NO_DEVICE);
EQUAL(ours::kBusy, UCS_ERR_BUSY);
EQUAL(ours::kLastError, UCS_ERR_LAST);

TEST_CASE("ucx: what is declared here is what the header declares") {
  void* failed = reinterpret_cast<void*>(intptr_t{UCS_ERR_IO_ERROR});
  CHECK(ours::is_error(failed));
  CHECK(ours::is_error(failed) == UCS_PTR_IS_ERR(failed));
  CHECK(ours::status_of(failed) == UCS_ERR_IO_ERROR);
  CHECK(!ours::is_error(nullptr));
  int request = 0;
  CHECK(!ours::is_error(&request));
}
#endif

TEST_CASE("ucx: a file that cannot be loaded is an error that names the package") {
  ::setenv("TENSORWIRE_UCX", "/nowhere/libucp.so", 1);
  try {
    tensorwire::ucx::library();
    FAIL("loaded");
  } catch (const tensorwire::Error& error) {
    CHECK(error.code() == tensorwire::Code::kUnavailable);
    std::string text = error.what();
    CHECK(text.find("/nowhere/libucp.so") != std::string::npos);
    CHECK(text.find("libucx0") != std::string::npos);
  }
  ::unsetenv("TENSORWIRE_UCX");
}
