/* libucp, loaded at run time: the functions in use, and nothing linked. */
#ifndef TWOSTROKE_UCX_LIBRARY_H
#define TWOSTROKE_UCX_LIBRARY_H

#include <stddef.h>
#include <ucp/api/ucp.h>

#define UCX_SYMBOLS(X)           \
    X(ucp_init_version)          \
    X(ucp_cleanup)               \
    X(ucp_get_version)           \
    X(ucp_config_read)           \
    X(ucp_config_modify)         \
    X(ucp_config_release)        \
    X(ucp_worker_create)         \
    X(ucp_worker_destroy)        \
    X(ucp_worker_get_address)    \
    X(ucp_worker_release_address) \
    X(ucp_worker_progress)       \
    X(ucp_worker_get_efd)        \
    X(ucp_worker_arm)            \
    X(ucp_worker_flush_nbx)      \
    X(ucp_worker_set_am_recv_handler) \
    X(ucp_mem_map)               \
    X(ucp_mem_unmap)             \
    X(ucp_rkey_pack)             \
    X(ucp_rkey_buffer_release)   \
    X(ucp_rkey_destroy)          \
    X(ucp_ep_create)             \
    X(ucp_ep_close_nbx)          \
    X(ucp_ep_flush_nbx)          \
    X(ucp_ep_query)              \
    X(ucp_ep_rkey_unpack)        \
    X(ucp_get_nbx)               \
    X(ucp_am_send_nbx)           \
    X(ucp_request_check_status)  \
    X(ucp_request_free)          \
    X(ucs_status_string)

typedef struct {
    void *handle;
    char path[4096]; /* of the file that really was loaded */
    unsigned major, minor, release;
#define X(name) __typeof__(&name) name;
    UCX_SYMBOLS(X)
#undef X
} UcxLibrary;

/* Loads `name` (a path, or a soname for the dynamic linker). Returns 0, or -1 with one line in `error`. The library
 * stays loaded for the life of the process: UCX starts threads and hooks that outlive a context. */
int ucx_library_load(UcxLibrary *library, const char *name, char *error, size_t error_size);

#endif
