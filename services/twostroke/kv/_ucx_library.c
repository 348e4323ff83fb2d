#define _GNU_SOURCE
#include "_ucx_library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int ucx_library_load(UcxLibrary *library, const char *name, char *error, size_t error_size)
{
    memset(library, 0, sizeof *library);
    void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        snprintf(error, error_size, "%s", dlerror());
        return -1;
    }
#define X(symbol)                                                                  \
    *(void **)&library->symbol = dlsym(handle, #symbol);                           \
    if (library->symbol == NULL) {                                                 \
        snprintf(error, error_size, "%s has no " #symbol "; it is too old", name); \
        dlclose(handle);                                                           \
        return -1;                                                                 \
    }
    UCX_SYMBOLS(X)
#undef X
    Dl_info info;
    const char *path = name;
    if (dladdr(*(void **)&library->ucp_init_version, &info) != 0 && info.dli_fname != NULL)
        path = info.dli_fname;
    snprintf(library->path, sizeof library->path, "%s", path);
    library->ucp_get_version(&library->major, &library->minor, &library->release);
    library->handle = handle;
    return 0;
}
