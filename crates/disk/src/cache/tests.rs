use super::*;
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;

fn page(seed: u64) -> Vec<u64> {
    (0..PAGE_WORDS as u64).map(|slot| seed << 16 | slot).collect()
}

#[test]
fn a_page_is_found_word_by_word_until_forgotten() {
    let cache = PageCache::new(1 << 20).unwrap();
    let key = PageKey::new(1, 42);
    assert_eq!(cache.get(key, 0), None);
    cache.fill(key, &page(7));
    assert_eq!(cache.get(key, 511), Some(7 << 16 | 511));
    cache.update(key, 5, 99);
    assert_eq!(cache.get(key, 5), Some(99));
    cache.forget(|owner| owner == 1);
    assert_eq!(cache.get(key, 5), None);
}

#[test]
fn the_budget_holds_however_many_pages_are_put_in() {
    let cache = PageCache::new(1 << 20).unwrap();
    for number in 0..10_000 {
        cache.fill(PageKey::new(1, number), &page(number));
    }
    assert!(cache.pages_used() * FRAME_COST <= 1 << 20);
    assert!(cache.capacity_pages() * FRAME_COST > 1 << 19);
}

#[test]
fn the_memory_of_dropped_pages_is_used_again() {
    let cache = PageCache::new(1 << 20).unwrap();
    for owner in 1..50 {
        (0..20).for_each(|number| cache.fill(PageKey::new(owner, number), &page(number)));
        cache.forget_page(PageKey::new(owner, 3));
        assert!(!cache.contains(PageKey::new(owner, 3)) && cache.contains(PageKey::new(owner, 4)));
        cache.forget(|other| other == owner);
    }
    assert_eq!(cache.pages_used(), 20);
}

#[test]
fn pages_of_two_levels_are_two_pages_of_one_owner() {
    let cache = PageCache::new(1 << 20).unwrap();
    let first = PageKey::new(1, PageKey::MAX_PAGES - 1);
    let second = first.in_second_level();
    cache.fill(first, &page(1));
    assert!(!cache.contains(second));
    cache.fill(second, &page(2));
    assert_eq!((cache.get(first, 0), cache.get(second, 0)), (Some(1 << 16), Some(2 << 16)));
    cache.forget(|owner| owner == 1);
    assert!(!cache.contains(first) && !cache.contains(second));
}

proptest! {
    /// Whatever is found is what was put in last; what is not found was evicted, never wrong.
    #[test]
    fn never_a_wrong_word(operations in prop::collection::vec((1u32..4, 0u64..200, 0usize..512, any::<u64>(), 0..8), 1..400)) {
        let cache = PageCache::new(200 << 10).unwrap();
        let mut model: HashMap<(u32, u64), Vec<u64>> = HashMap::new();
        for (owner, number, slot, word, operation) in operations {
            let key = PageKey::new(owner, number);
            if operation == 7 {
                cache.forget(|other| other == owner);
                model.retain(|(of, _), _| *of != owner);
            } else if operation == 6 {
                cache.forget_page(key);
                model.remove(&(owner, number));
            } else if operation % 2 == 1 {
                let words: Vec<u64> = (0..PAGE_WORDS as u64).map(|at| word.wrapping_add(at)).collect();
                cache.fill(key, &words);
                model.insert((owner, number), words);
            } else if let Some(words) = model.get_mut(&(owner, number)) {
                cache.update(key, slot, word);
                words[slot] = word;
            }
            prop_assert!(model.contains_key(&(owner, number)) || !cache.contains(key));
            for (&(owner, number), words) in &model {
                if let Some(found) = cache.get(PageKey::new(owner, number), slot) {
                    prop_assert_eq!(found, words[slot]);
                }
                let mut copied = [0; PAGE_WORDS];
                if cache.copy(PageKey::new(owner, number), &mut copied) {
                    prop_assert_eq!(&copied[..], words);
                }
            }
        }
    }
}

/// Readers race with fills that reuse the same few ways, and the memory of dropped pages: a word must belong to the page it was
/// asked of.
#[test]
fn racing_readers_never_see_another_pages_word() {
    let cache = Arc::new(PageCache::new(0).unwrap());
    let stop = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let (cache, stop) = (cache.clone(), stop.clone());
            scope.spawn(move || {
                let mut hits = 0u64;
                for number in (0..400).cycle() {
                    if stop.load(Ordering::Relaxed) && hits > 0 {
                        return;
                    }
                    if let Some(word) = cache.get(PageKey::new(1, number), 3) {
                        assert_eq!(word, number << 16 | 3);
                        hits += 1;
                    }
                    let mut words = [0; PAGE_WORDS];
                    if cache.copy(PageKey::new(1, number), &mut words) {
                        assert_eq!(words[..], page(number));
                    }
                }
            });
        }
        for round in 0..20_000u64 {
            let number = round % 400;
            cache.fill(PageKey::new(1, number), &page(number));
            if round % 3 == 0 {
                cache.forget_page(PageKey::new(1, round * 7 % 400));
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// Readers race with updates of an entry of two words, and of its neighbour: they see both words of one update, or none.
#[test]
fn racing_readers_see_both_words_of_an_entry() {
    let cache = PageCache::new(0).unwrap();
    let (key, stop) = (PageKey::new(1, 5), AtomicBool::new(false));
    cache.fill(key, &[0; PAGE_WORDS]);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut seen = 0u64;
                    while seen == 0 || !stop.load(Ordering::Relaxed) {
                        if let Some([word, subclusters]) = cache.get_pair(key, 6) {
                            assert_eq!(subclusters, word.wrapping_mul(3));
                            seen += 1;
                        }
                    }
                })
            })
            .collect();
        for word in 1..50_000u64 {
            cache.update_pair(key, 6, [word, word.wrapping_mul(3)]);
            cache.update_pair(key, 8, [word, word]);
        }
        stop.store(true, Ordering::Relaxed);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
    assert_eq!(cache.get_pair(key, 8), Some([49_999; 2]));
}
