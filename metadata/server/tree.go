package server

import "iter"

// tree is an immutable sorted map: a treap whose changes copy the path to the
// root and share everything else. A copy of the root is therefore a snapshot of
// the whole, for free; that is what lets reads, checkpoints and transfers run
// beside Apply without a lock.
//
// The shape depends only on the keys that are in it, and nothing outside can see
// it: all iteration is in key order.
type tree[K, V any] struct {
	root  *node[K, V]
	count int
	order *order[K]
}

// order is how a tree compares and spreads its keys.
type order[K any] struct {
	compare func(a, b K) int
	hash    func(K) uint64 // a node's priority; equal hashes only cost balance
}

type node[K, V any] struct {
	key         K
	value       V
	priority    uint64
	left, right *node[K, V]
}

func newTree[K, V any](o *order[K]) tree[K, V] { return tree[K, V]{order: o} }

// get returns key's value.
func (t tree[K, V]) get(key K) (value V, ok bool) {
	for n := t.root; n != nil; {
		switch c := t.order.compare(key, n.key); {
		case c == 0:
			return n.value, true
		case c < 0:
			n = n.left
		default:
			n = n.right
		}
	}
	return value, false
}

// with returns the tree in which key has value.
func (t tree[K, V]) with(key K, value V) tree[K, V] {
	below, found, above := t.split(t.root, key)
	n := &node[K, V]{key: key, value: value, priority: t.order.hash(key)}
	if found == nil {
		t.count++
	}
	t.root = merge(merge(below, n), above)
	return t
}

// without returns the tree in which key is absent.
func (t tree[K, V]) without(key K) tree[K, V] {
	if _, ok := t.get(key); !ok {
		return t // nothing to copy
	}
	below, _, above := t.split(t.root, key)
	t.count--
	t.root = merge(below, above)
	return t
}

// split parts n into what is below key, key's own node, and what is above.
func (t tree[K, V]) split(n *node[K, V], key K) (below, found, above *node[K, V]) {
	if n == nil {
		return nil, nil, nil
	}
	c := t.order.compare(key, n.key)
	if c == 0 {
		return n.left, n, n.right
	}
	cut := *n
	if c < 0 {
		below, found, cut.left = t.split(n.left, key)
		return below, found, &cut
	}
	cut.right, found, above = t.split(n.right, key)
	return &cut, found, above
}

// merge joins two trees of which every key of a is below every key of b.
func merge[K, V any](a, b *node[K, V]) *node[K, V] {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	case a.priority >= b.priority:
		top := *a
		top.right = merge(a.right, b)
		return &top
	default:
		top := *b
		top.left = merge(a, b.left)
		return &top
	}
}

// from yields the keys at or above key, in order.
func (t tree[K, V]) from(key K) iter.Seq2[K, V] {
	return func(yield func(K, V) bool) { t.walk(t.root, &key, yield) }
}

// all yields every key, in order.
func (t tree[K, V]) all() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) { t.walk(t.root, nil, yield) }
}

func (t tree[K, V]) walk(n *node[K, V], from *K, yield func(K, V) bool) bool {
	if n == nil {
		return true
	}
	if from != nil && t.order.compare(n.key, *from) < 0 {
		return t.walk(n.right, from, yield)
	}
	return t.walk(n.left, from, yield) && yield(n.key, n.value) && t.walk(n.right, nil, yield)
}

// first returns the lowest key.
func (t tree[K, V]) first() (key K, ok bool) {
	n := t.root
	if n == nil {
		return key, false
	}
	for n.left != nil {
		n = n.left
	}
	return n.key, true
}

// hashString is FNV-1a with a final mix, so that keys that differ in their last
// byte only still get unrelated priorities.
func hashString(s string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return mix(h)
}

// mix is the finalizer of splitmix64.
func mix(h uint64) uint64 {
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}
