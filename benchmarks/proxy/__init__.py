"""What a request costs in a proxy, next to other proxies, in front of mock engines that cost almost nothing."""
