/* Notices that a network interface in use was replaced by another one, which UCX from 1.19 on cannot survive.
 *
 * It reads the routes once in the life of a process, by the interfaces' numbers. One that is taken away and made anew
 * (a container that is disconnected and connected) has another number, so there are no routes over it, for a new
 * context neither. A peer to whom it looks the same connects, UCX finds no way back, and fails an endpoint that has no
 * configuration yet: segmentation fault (1.22). So UCX makes no progress from the replacement on. */
#define _GNU_SOURCE
#include "_ucx_worker.h"

#include <ifaddrs.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static const double LOOK_S = 0.001; /* a peer takes longer to connect over a new interface */

struct Interface {
    char name[IF_NAMESIZE];
    unsigned index;
    bool used;
    Interface *next;
};

static bool has_address(const struct ifaddrs *entry)
{
    return entry->ifa_addr != NULL && !(entry->ifa_flags & IFF_LOOPBACK) &&
           (entry->ifa_addr->sa_family == AF_INET || entry->ifa_addr->sa_family == AF_INET6);
}

/* Without its means nothing is noticed. */
void network_open(Worker *w)
{
    struct sockaddr_nl changes = {.nl_family = AF_NETLINK,
                                  .nl_groups = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR};
    struct ifaddrs *list;
    w->network_fd = -1;
    if (w->ucx.major == 1 && w->ucx.minor < 19)
        return; /* asks for routes whenever it connects */
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, NETLINK_ROUTE);
    if (fd < 0)
        return;
    if (bind(fd, (struct sockaddr *)&changes, sizeof changes) != 0 || getifaddrs(&list) != 0) {
        close(fd);
        return;
    }
    w->network_fd = fd;
    for (const struct ifaddrs *entry = list; entry != NULL; entry = entry->ifa_next) {
        Interface *interface = has_address(entry) ? calloc(1, sizeof *interface) : NULL;
        if (interface == NULL)
            continue;
        strncpy(interface->name, entry->ifa_name, sizeof interface->name - 1);
        interface->index = if_nametoindex(entry->ifa_name);
        interface->next = w->interfaces;
        w->interfaces = interface;
    }
    freeifaddrs(list);
}

void network_close(Worker *w)
{
    if (w->network_fd >= 0)
        close(w->network_fd);
    while (w->interfaces != NULL) {
        Interface *interface = w->interfaces;
        w->interfaces = interface->next;
        free(interface);
    }
}

void network_used(Worker *w, ucp_ep_h endpoint)
{
    ucp_transport_entry_t lanes[MOST_LANES];
    unsigned count = w->interfaces == NULL ? 0 : lanes_of(w, endpoint, lanes);
    for (unsigned i = 0; i < count; i++)
        for (Interface *interface = w->interfaces; interface != NULL; interface = interface->next)
            if (strcmp(interface->name, lanes[i].device_name) == 0)
                interface->used = true;
}

static bool any_gone(const Worker *w)
{
    char name[IF_NAMESIZE];
    for (const Interface *interface = w->interfaces; interface != NULL; interface = interface->next)
        if (interface->used && if_indextoname(interface->index, name) == NULL)
            return true;
    return false;
}

static bool any_new(const Worker *w)
{
    bool found = false;
    struct ifaddrs *list;
    if (getifaddrs(&list) != 0)
        return false;
    for (const struct ifaddrs *entry = list; entry != NULL && !found; entry = entry->ifa_next) {
        unsigned index = has_address(entry) ? if_nametoindex(entry->ifa_name) : 0;
        const Interface *interface = w->interfaces;
        while (interface != NULL && interface->index != index)
            interface = interface->next;
        found = index != 0 && interface == NULL;
    }
    freeifaddrs(list);
    return found;
}

bool network_replaced(Worker *w)
{
    char change[4096];
    double time;
    if (w->replaced || w->network_fd < 0 || (time = now_s()) < w->network_look_s)
        return w->replaced;
    w->network_look_s = time + LOOK_S;
    bool changed = false;
    while (recv(w->network_fd, change, sizeof change, 0) > 0)
        changed = true;
    if (changed)
        w->replaced = any_gone(w) && any_new(w);
    return w->replaced;
}
