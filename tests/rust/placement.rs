//! Plans of devices: within budgets, whatever the sizes.

use powerinfer_rs::sparse::placement::{Demand, LayerDemand, place};

use crate::common::Random;

fn random_demand(random: &mut Random, n_layers: usize, n_ff: usize) -> Demand {
    let mut below = |n: u64| (random.float().abs() * n as f32) as u64 % n;
    let layers = (0..n_layers)
        .map(|_| LayerDemand {
            attention: below(2000),
            cache: below(500),
            predictor: below(300),
            neuron: below(40),
            counts: (0..n_ff).map(|_| below(50) * below(50)).collect(),
        })
        .collect();
    Demand { layers, head: below(1000), overhead: below(500) }
}

#[test]
fn plans_stay_within_budgets() {
    let mut random = Random(7);
    for case in 0..300 {
        let (n_layers, n_ff) = (case % 9, case % 70);
        let demand = random_demand(&mut random, n_layers, n_ff);
        let budgets: Vec<u64> =
            (0..1 + case % 3).map(|i| 97 * (case as u64 % 211) * (i as u64 + 1)).collect();
        let least = 1 + case % 30;
        let plans = place(&demand, &budgets, least).unwrap();
        let mut next = 0;
        for (plan, budget) in plans.iter().zip(&budgets) {
            assert!(plan.bytes.total() <= *budget, "{plan:?} for {budget}");
            assert_eq!(plan.layers.start, next);
            next = plan.layers.end;
            assert_eq!(plan.hot.len(), plan.layers.len());
            for hot in &plan.hot {
                assert!(hot.is_empty() || hot.len() >= least.min(n_ff));
                assert!(hot.is_sorted_by(|a, b| a < b) && hot.iter().all(|n| (*n as usize) < n_ff));
            }
            assert!((0.0..=1.0).contains(&plan.coverage(&demand)));
        }
        assert!(next == n_layers || budgets.iter().all(|b| *b == 0));
    }
}

#[test]
fn what_fits_is_placed_in_order() {
    let layer = || LayerDemand { attention: 10, cache: 5, predictor: 3, neuron: 2, counts: vec![4, 9, 0, 9] };
    let demand = Demand { layers: vec![layer(), layer()], head: 7, overhead: 1 };
    let plan = |budget| place(&demand, &[budget], 2).unwrap().remove(0);
    assert_eq!(plan(0).bytes.total(), 0);
    // Attention without its predictor would be of no use to a neuron.
    assert_eq!((plan(18).bytes.total(), plan(19).n_attention, plan(19).hot.concat()), (0, 1, vec![]));
    assert_eq!((plan(20).n_attention, plan(20).n_predictors, plan(20).head), (1, 1, false));
    let whole = plan(31 + 6 + 7 + 16);
    assert!(whole.head && whole.n_predictors == 2 && whole.hot == vec![vec![0, 1, 2, 3]; 2]);
    assert_eq!(whole.bytes.total(), 60);
    // Room for five neurons: the four that fire most, and the next.
    assert_eq!(plan(54).hot, vec![vec![0, 1, 3], vec![1, 3]]);
}

#[test]
fn counts_beyond_64_bits_are_refused() {
    let layer = LayerDemand { attention: 0, cache: 0, predictor: 0, neuron: 1, counts: vec![u64::MAX; 2] };
    let demand = Demand { layers: vec![layer], head: 0, overhead: 0 };
    assert!(place(&demand, &[1], 1).is_err());
}

#[test]
fn the_largest_model_is_planned_soon() {
    let mut random = Random(3);
    let demand = random_demand(&mut random, 80, 28_672);
    let all: u64 = demand.layers.iter().map(|layer| layer.neuron * layer.counts.len() as u64).sum();
    let plans = place(&demand, &[all / 5], 1024).unwrap();
    assert!(plans[0].bytes.total() <= all / 5);
}
