BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0007');
CREATE TABLE attempts (
	id INTEGER NOT NULL, 
	session_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	stage VARCHAR(128) NOT NULL, 
	folder TEXT NOT NULL, 
	ranks INTEGER NOT NULL, 
	first_step INTEGER NOT NULL, 
	last_step INTEGER NOT NULL, 
	gained BOOLEAN, 
	outcome VARCHAR(32), 
	cause TEXT NOT NULL, 
	started_at DATETIME NOT NULL, 
	ended_at DATETIME, 
	CONSTRAINT pk_attempts PRIMARY KEY (id), 
	CONSTRAINT fk_attempts_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE CASCADE, 
	CONSTRAINT uq_attempts_session_id UNIQUE (session_id, number)
);
INSERT INTO "attempts" VALUES(1,1,1,'train','runs/test/1/attempts/1.1',2,0,23,1,'lost','no rank left a word (the shim was killed)','2026-11-23 13:13:30.477119','2026-11-23 13:13:42.286761');
INSERT INTO "attempts" VALUES(2,2,1,'train','runs/test/1/attempts/2.1',2,16,28,1,'lost','no rank left a word (the shim was killed)','2026-11-23 13:13:42.439255','2026-11-23 13:13:51.091685');
INSERT INTO "attempts" VALUES(3,3,1,'train','runs/test/1/attempts/3.1',2,16,48,1,'lost','no rank left a word (the shim was killed)','2026-11-23 13:13:51.259088','2026-11-23 13:14:03.953010');
INSERT INTO "attempts" VALUES(4,4,1,'train','runs/test/1/attempts/4.1',2,16,59,1,'stopped','','2026-11-23 13:14:04.191064','2026-11-23 13:14:17.325602');
INSERT INTO "attempts" VALUES(5,5,1,'train','runs/test/1/attempts/5.1',2,59,79,1,'lost','no rank left a word (the shim was killed)','2026-11-23 13:14:19.270402','2026-11-23 13:14:29.351109');
INSERT INTO "attempts" VALUES(6,6,1,'train','runs/test/1/attempts/6.1',2,74,360,1,'finished','','2026-11-23 13:14:29.520808','2026-11-23 13:15:10.800867');
CREATE TABLE charges (
	id INTEGER NOT NULL, 
	session_id INTEGER, 
	accelerator VARCHAR(64) NOT NULL, 
	factor DOUBLE NOT NULL, 
	from_at DATETIME NOT NULL, 
	used_s DOUBLE NOT NULL, pool VARCHAR(64) DEFAULT '' NOT NULL, why TEXT DEFAULT '' NOT NULL, 
	CONSTRAINT pk_charges PRIMARY KEY (id), 
	CONSTRAINT fk_charges_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE SET NULL
);
INSERT INTO "charges" VALUES(1,1,'Tesla T4',1.0,'2026-11-23 13:13:30.339775',9.592336,'generic','');
INSERT INTO "charges" VALUES(2,2,'Tesla T4',1.0,'2026-11-23 13:13:42.318737',6.341839,'generic','');
INSERT INTO "charges" VALUES(3,3,'Tesla T4',1.0,'2026-11-23 13:13:51.122679',10.523563,'generic','');
INSERT INTO "charges" VALUES(4,4,'Tesla T4',1.0,'2026-11-23 13:14:03.994294',13.341064,'generic','');
INSERT INTO "charges" VALUES(5,5,'Tesla T4',1.0,'2026-11-23 13:14:19.114656',8.116171,'generic','');
INSERT INTO "charges" VALUES(6,6,'Tesla T4',1.0,'2026-11-23 13:14:29.384803',41.427018,'generic','');
CREATE TABLE checkpoints (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	session_id INTEGER, 
	stage VARCHAR(128) NOT NULL, 
	step INTEGER NOT NULL, 
	final BOOLEAN NOT NULL, 
	path TEXT NOT NULL, 
	bytes BIGINT NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	why TEXT NOT NULL, 
	took_s DOUBLE NOT NULL, 
	blocking_s DOUBLE NOT NULL, 
	metrics JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	verified_at DATETIME, source TEXT DEFAULT '' NOT NULL, measured JSON DEFAULT '{}' NOT NULL, best VARCHAR(200) DEFAULT '' NOT NULL, 
	CONSTRAINT pk_checkpoints PRIMARY KEY (id), 
	CONSTRAINT fk_checkpoints_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT fk_checkpoints_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE SET NULL, 
	CONSTRAINT uq_checkpoints_path UNIQUE (path)
);
INSERT INTO "checkpoints" VALUES(1,'7b85acd27321',1,'train',16,0,'runs/test/1/checkpoints/train/step-00000016',318479,'dropped','',2.91983740025898441672e-02,6.03784099803306162357e-03,'{"loss":0.6489629745483398,"lr":0.0019876944964248404,"skipped":0.0}','2026-11-23 13:13:38.372810','2026-11-23 13:13:38.400524','','{"loss":16,"lr":16,"skipped":0}','');
INSERT INTO "checkpoints" VALUES(2,'7b85acd27321',1,'train',24,0,'runs/test/1/checkpoints/train/step-00000024',318488,'broken','/old/home/runs/test/1/checkpoints/train/step-00000024 does not match its manifest',1.44299059975310228765e-02,5.13472199963871389627e-03,'{"loss":0.6411962509155273,"lr":0.001838751232661451,"skipped":0.0}','2026-11-23 13:13:40.085123','2026-11-23 13:13:40.099803','','{"loss":24,"lr":24,"skipped":0}','');
INSERT INTO "checkpoints" VALUES(3,'7b85acd27321',3,'train',34,0,'runs/test/1/checkpoints/train/step-00000034',318686,'broken','/old/home/runs/test/1/checkpoints/train/step-00000034 does not match its manifest',2.35314920064411126077e-02,5.88537399744382128119e-03,'{"dice":0.3024967459472252,"dice_at_threshold":0.5556151695704967,"epoch":4.0,"loss":0.6318633556365967,"lr":0.0014542635044896767,"skipped":0.0,"threshold":0.6}','2026-11-23 13:13:58.926003','2026-11-23 13:13:58.957440','','{"dice":30,"dice_at_threshold":30,"epoch":30,"loss":34,"lr":34,"skipped":16,"threshold":30}','');
INSERT INTO "checkpoints" VALUES(4,'7b85acd27321',4,'train',33,0,'runs/test/1/checkpoints/train/step-00000033',318686,'dropped','',1.9913602001906838268e-02,4.90675399487372487783e-03,'{"dice":0.3024967459472252,"dice_at_threshold":0.5556151695704967,"epoch":4.0,"loss":0.6270700693130493,"lr":0.0015002499999999998,"skipped":0.0,"threshold":0.6}','2026-11-23 13:14:11.501296','2026-11-23 13:14:11.522554','','{"dice":30,"dice_at_threshold":30,"epoch":30,"loss":33,"lr":33,"skipped":16,"threshold":30}','');
INSERT INTO "checkpoints" VALUES(5,'7b85acd27321',4,'train',55,0,'runs/test/1/checkpoints/train/step-00000055',318691,'dropped','',9.60809800017159432172e-03,0.00310212899785256,'{"dice":0.3024967459472252,"dice_at_threshold":0.5556151695704967,"epoch":4.0,"loss":0.5960667133331299,"lr":0.0004130086403336732,"skipped":0.0,"threshold":0.6}','2026-11-23 13:14:15.079734','2026-11-23 13:14:15.090097','','{"dice":30,"dice_at_threshold":30,"epoch":30,"loss":55,"lr":55,"skipped":16,"threshold":30}','');
INSERT INTO "checkpoints" VALUES(6,'7b85acd27321',4,'train',59,0,'runs/test/1/checkpoints/train/step-00000059',318691,'dropped','',1.80643979983869940042e-02,4.68948100024135783314e-03,'{"dice":0.3024967459472252,"dice_at_threshold":0.5556151695704967,"epoch":4.0,"loss":0.5789777040481567,"lr":0.0002577267469353447,"skipped":0.0,"threshold":0.6}','2026-11-23 13:14:16.548216','2026-11-23 13:14:16.565972','','{"dice":30,"dice_at_threshold":30,"epoch":30,"loss":59,"lr":59,"skipped":16,"threshold":30}','');
INSERT INTO "checkpoints" VALUES(7,'7b85acd27321',5,'train',74,0,'runs/test/1/checkpoints/train/step-00000074',318888,'dropped','',1.90022899987525306642e-02,0.00771241300390102,'{"dice":0.4575784357048166,"dice_at_threshold":0.5468516928083894,"epoch":9.0,"loss":0.5608619451522827,"lr":0.0019996574963130694,"skipped":0.0,"threshold":0.6}','2026-11-23 13:14:26.416870','2026-11-23 13:14:26.440465','','{"dice":60,"dice_at_threshold":60,"epoch":60,"loss":74,"lr":74,"skipped":59,"threshold":60}','');
INSERT INTO "checkpoints" VALUES(8,'7b85acd27321',6,'train',95,0,'runs/test/1/checkpoints/train/step-00000095',319096,'dropped','',1.9345396998687647283e-02,5.44129699846962466835e-03,'{"dice":0.45428756283282734,"dice_at_threshold":0.5623327229187209,"epoch":14.0,"loss":0.4421023428440094,"lr":0.001838751232661451,"skipped":0.0,"threshold":0.4}','2026-11-23 13:14:35.848807','2026-11-23 13:14:35.868342','','{"dice":90,"dice_at_threshold":90,"epoch":90,"loss":95,"lr":95,"skipped":74,"threshold":90}','');
INSERT INTO "checkpoints" VALUES(9,'7b85acd27321',6,'train',127,0,'runs/test/1/checkpoints/train/step-00000127',319304,'dropped','',1.75500010009272955358e-02,4.17927599482936784625e-03,'{"dice":0.6922692197770791,"dice_at_threshold":0.6922692197770791,"epoch":19.0,"loss":0.34713268280029297,"lr":0.0011568562478077107,"skipped":0.0,"threshold":0.5}','2026-11-23 13:14:39.206363','2026-11-23 13:14:39.224793','','{"dice":120,"dice_at_threshold":120,"epoch":120,"loss":127,"lr":127,"skipped":74,"threshold":120}','');
INSERT INTO "checkpoints" VALUES(10,'7b85acd27321',6,'train',160,0,'runs/test/1/checkpoints/train/step-00000160',319509,'dropped','',1.71012010177946649491e-02,3.43499300652183592319e-03,'{"dice":0.736682107701216,"dice_at_threshold":0.736682107701216,"epoch":24.0,"loss":0.31672045588493347,"lr":0.00035137667569398154,"skipped":0.0,"threshold":0.5}','2026-11-23 13:14:42.410810','2026-11-23 13:14:42.431489','','{"dice":150,"dice_at_threshold":150,"epoch":150,"loss":160,"lr":160,"skipped":74,"threshold":150}','');
INSERT INTO "checkpoints" VALUES(11,'7b85acd27321',6,'train',192,0,'runs/test/1/checkpoints/train/step-00000192',319626,'dropped','',2.51555899958475492894e-02,1.11694169972906820476e-02,'{"dice":0.7516117348786672,"dice_at_threshold":0.7525967894239849,"epoch":29.0,"loss":0.32152795791625977,"lr":1.3425036869305187e-06,"skipped":0.0,"threshold":0.6}','2026-11-23 13:14:45.743473','2026-11-23 13:14:45.772956','','{"dice":180,"dice_at_threshold":180,"epoch":180,"loss":192,"lr":192,"skipped":74,"threshold":180}','');
INSERT INTO "checkpoints" VALUES(12,'7b85acd27321',6,'train',219,0,'runs/test/1/checkpoints/train/step-00000219',319907,'dropped','',1.92124710010830312967e-02,0.00542344999848865,'{"dice":0.7766562672049917,"dice_at_threshold":0.7766562672049917,"epoch":34.0,"loss":0.2856449484825134,"lr":0.0019426701703466323,"skipped":0.0,"threshold":0.5}','2026-11-23 13:14:49.199173','2026-11-23 13:14:49.226984','','{"dice":210,"dice_at_threshold":210,"epoch":210,"loss":219,"lr":219,"skipped":74,"threshold":210}','');
INSERT INTO "checkpoints" VALUES(13,'7b85acd27321',6,'train',244,0,'runs/test/1/checkpoints/train/step-00000244',320116,'dropped','',1.91296870034420862793e-02,5.41566800529835745692e-03,'{"dice":0.7973198089808611,"dice_at_threshold":0.7985261837566635,"epoch":39.0,"loss":0.24197900295257568,"lr":0.0017854242724153044,"skipped":0.0,"threshold":0.6}','2026-11-23 13:14:53.022245','2026-11-23 13:14:53.043283','','{"dice":240,"dice_at_threshold":240,"epoch":240,"loss":244,"lr":244,"skipped":74,"threshold":240}','');
INSERT INTO "checkpoints" VALUES(14,'7b85acd27321',6,'train',269,0,'runs/test/1/checkpoints/train/step-00000269',320116,'dropped','',1.2568575999466702342e-02,0.00478258899966022,'{"dice":0.7973198089808611,"dice_at_threshold":0.7985261837566635,"epoch":39.0,"loss":0.2747648358345032,"lr":0.0015448667154975195,"skipped":0.0,"threshold":0.6}','2026-11-23 13:14:56.420785','2026-11-23 13:14:56.436349','','{"dice":240,"dice_at_threshold":240,"epoch":240,"loss":269,"lr":269,"skipped":74,"threshold":240}','');
INSERT INTO "checkpoints" VALUES(15,'7b85acd27321',6,'train',292,0,'runs/test/1/checkpoints/train/step-00000292',320322,'dropped','',2.03337320053833536803e-02,4.87908300419803708791e-03,'{"dice":0.8160790964529282,"dice_at_threshold":0.8236678305753757,"epoch":44.0,"loss":0.20265355706214905,"lr":0.0012718047296401416,"skipped":0.0,"threshold":0.6}','2026-11-23 13:14:59.788462','2026-11-23 13:14:59.809937','','{"dice":270,"dice_at_threshold":270,"epoch":270,"loss":292,"lr":292,"skipped":74,"threshold":270}','');
INSERT INTO "checkpoints" VALUES(16,'7b85acd27321',6,'train',320,0,'runs/test/1/checkpoints/train/step-00000320',320526,'verified','',1.89440369940712116658e-02,4.85690999630605801939e-03,'{"dice":0.8295502072164557,"dice_at_threshold":0.8295502072164557,"epoch":49.0,"loss":0.20906278491020203,"lr":0.0009090441321459293,"skipped":0.0,"threshold":0.5}','2026-11-23 13:15:03.175272','2026-11-23 13:15:03.196079','','{"dice":300,"dice_at_threshold":300,"epoch":300,"loss":320,"lr":320,"skipped":74,"threshold":300}','');
INSERT INTO "checkpoints" VALUES(17,'7b85acd27321',6,'train',344,0,'runs/test/1/checkpoints/train/step-00000344',320726,'verified','',2.15895289948093704879e-02,6.32901299832155928015e-03,'{"dice":0.842924510217383,"dice_at_threshold":0.842924510217383,"epoch":54.0,"loss":0.2335912138223648,"lr":0.000605953515543925,"skipped":0.0,"threshold":0.5}','2026-11-23 13:15:06.663852','2026-11-23 13:15:06.684695','','{"dice":330,"dice_at_threshold":330,"epoch":330,"loss":344,"lr":344,"skipped":74,"threshold":330}','');
INSERT INTO "checkpoints" VALUES(18,'7b85acd27321',6,'train',360,1,'runs/test/1/checkpoints/train/step-00000360-final',320926,'verified','',1.7197602006490342319e-02,6.16096700832713395357e-03,'{"dice":0.841202698067909,"dice_at_threshold":0.841202698067909,"epoch":59.0,"loss":0.19839638471603394,"lr":0.0004236433825577848,"skipped":0.0,"threshold":0.5}','2026-11-23 13:15:09.220492','2026-11-23 13:15:09.237605','','{"dice":360,"dice_at_threshold":360,"epoch":360,"loss":360,"lr":360,"skipped":74,"threshold":360}','');
CREATE TABLE curves (
	id INTEGER NOT NULL, 
	attempt_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	lines TEXT NOT NULL, 
	CONSTRAINT pk_curves PRIMARY KEY (id), 
	CONSTRAINT fk_curves_attempt_id FOREIGN KEY(attempt_id) REFERENCES attempts (id) ON DELETE CASCADE, 
	CONSTRAINT uq_curves_attempt_id UNIQUE (attempt_id, number)
);
CREATE TABLE events (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	session_id INTEGER, 
	at DATETIME NOT NULL, 
	kind VARCHAR(48) NOT NULL, 
	phase VARCHAR(16) NOT NULL, 
	facts JSON NOT NULL, 
	CONSTRAINT pk_events PRIMARY KEY (id), 
	CONSTRAINT fk_events_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT fk_events_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE CASCADE
);
INSERT INTO "events" VALUES(1,'7b85acd27321',1,'2026-11-23 13:13:30.462133','SessionOpened','starting','{}');
INSERT INTO "events" VALUES(2,'7b85acd27321',1,'2026-11-23 13:13:30.495690','launched','','{"attempt":"1.1","stage":"train","from":"the beginning","step":0,"step_on_disk":null,"lost_steps":0}');
INSERT INTO "events" VALUES(3,'7b85acd27321',1,'2026-11-23 13:13:33.933112','reading','','{"what":"volumes-train","done":"6","total":"6","left_s":"0"}');
INSERT INTO "events" VALUES(4,'7b85acd27321',1,'2026-11-23 13:13:33.977877','Attached','training','{"state_bytes":260796}');
INSERT INTO "events" VALUES(5,'7b85acd27321',1,'2026-11-23 13:13:33.978775','exactness','','{"data":"keyed","deterministic":"not asked for"}');
INSERT INTO "events" VALUES(6,'7b85acd27321',1,'2026-11-23 13:13:33.979345','memory_facts','','{"batch":"4","num_workers":"0","batchnorm":"False","blocks":"5","device":"cpu","stage":"train"}');
INSERT INTO "events" VALUES(7,'7b85acd27321',1,'2026-11-23 13:13:35.926351','gpu_lost','','{"gpu":0}');
INSERT INTO "events" VALUES(8,'7b85acd27321',1,'2026-11-23 13:13:36.975408','CheckpointDue','saving','{}');
INSERT INTO "events" VALUES(9,'7b85acd27321',1,'2026-11-23 13:13:38.403566','CheckpointVerified','training','{"step":16,"took_s":0.029198374002589844,"blocking_s":0.006037840998033062,"bytes":318479,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(10,'7b85acd27321',1,'2026-11-23 13:13:39.048834','SaveRequested','saving','{}');
INSERT INTO "events" VALUES(11,'7b85acd27321',1,'2026-11-23 13:13:40.107378','CheckpointVerified','training','{"step":24,"took_s":0.014429905997531023,"blocking_s":0.005134721999638714,"bytes":318488,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(12,'7b85acd27321',1,'2026-11-23 13:13:42.306635','SessionLost','cut off','{"found_by":18299,"why":"no rank left a word (the shim was killed)"}');
INSERT INTO "events" VALUES(13,'7b85acd27321',2,'2026-11-23 13:13:42.409949','SessionOpened','starting','{}');
INSERT INTO "events" VALUES(14,'7b85acd27321',2,'2026-11-23 13:13:42.429884','set_aside','','{"checkpoint":"step-00000024.broken","why":"/old/home/runs/test/1/checkpoints/train/step-00000024 does not match its manifest\n  rank1.safetensors: expected xxh3 cb1d2a27e9f8\u2026, found e58db8c86b8e\u2026"}');
INSERT INTO "events" VALUES(15,'7b85acd27321',2,'2026-11-23 13:13:42.452229','launched','','{"attempt":"2.1","stage":"train","from":"disk","step":16,"step_on_disk":16,"lost_steps":0}');
INSERT INTO "events" VALUES(16,'7b85acd27321',2,'2026-11-23 13:13:45.699633','Attached','training','{"state_bytes":260904}');
INSERT INTO "events" VALUES(17,'7b85acd27321',2,'2026-11-23 13:13:45.700927','exactness','','{"data":"keyed","deterministic":"not asked for"}');
INSERT INTO "events" VALUES(18,'7b85acd27321',2,'2026-11-23 13:13:45.701614','memory_facts','','{"batch":"4","num_workers":"0","batchnorm":"False","blocks":"5","device":"cpu","stage":"train"}');
INSERT INTO "events" VALUES(19,'7b85acd27321',2,'2026-11-23 13:13:47.712867','SaveRequested','saving','{}');
INSERT INTO "events" VALUES(20,'7b85acd27321',2,'2026-11-23 13:13:51.111627','SessionLost','cut off','{"found_by":18369,"why":"no rank left a word (the shim was killed)"}');
INSERT INTO "events" VALUES(21,'7b85acd27321',3,'2026-11-23 13:13:51.242800','SessionOpened','starting','{}');
INSERT INTO "events" VALUES(22,'7b85acd27321',3,'2026-11-23 13:13:51.276103','launched','','{"attempt":"3.1","stage":"train","from":"disk","step":16,"step_on_disk":16,"lost_steps":0}');
INSERT INTO "events" VALUES(23,'7b85acd27321',3,'2026-11-23 13:13:54.658552','Attached','training','{"state_bytes":260904}');
INSERT INTO "events" VALUES(26,'7b85acd27321',3,'2026-11-23 13:13:57.663140','CheckpointDue','saving','{}');
INSERT INTO "events" VALUES(27,'7b85acd27321',3,'2026-11-23 13:13:58.961695','CheckpointVerified','training','{"step":34,"took_s":0.023531492006441113,"blocking_s":0.005885373997443821,"bytes":318686,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(28,'7b85acd27321',3,'2026-11-23 13:14:03.981144','SessionLost','cut off','{"found_by":18456,"why":"no rank left a word (the shim was killed)"}');
INSERT INTO "events" VALUES(29,'7b85acd27321',4,'2026-11-23 13:14:04.149479','SessionOpened','starting','{}');
INSERT INTO "events" VALUES(30,'7b85acd27321',4,'2026-11-23 13:14:04.174081','set_aside','','{"checkpoint":"step-00000034.broken","why":"/old/home/runs/test/1/checkpoints/train/step-00000034 does not match its manifest\n  rank0.json: expected 19811 bytes, found 18794"}');
INSERT INTO "events" VALUES(31,'7b85acd27321',4,'2026-11-23 13:14:04.203665','launched','','{"attempt":"4.1","stage":"train","from":"disk","step":16,"step_on_disk":16,"lost_steps":0}');
INSERT INTO "events" VALUES(32,'7b85acd27321',4,'2026-11-23 13:14:07.711503','Attached','training','{"state_bytes":260904}');
INSERT INTO "events" VALUES(35,'7b85acd27321',4,'2026-11-23 13:14:10.716042','CheckpointDue','saving','{}');
INSERT INTO "events" VALUES(36,'7b85acd27321',4,'2026-11-23 13:14:11.526445','CheckpointVerified','training','{"step":33,"took_s":0.01991360200190684,"blocking_s":0.004906753994873725,"bytes":318686,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(37,'7b85acd27321',4,'2026-11-23 13:14:14.522393','CheckpointDue','saving','{}');
INSERT INTO "events" VALUES(38,'7b85acd27321',4,'2026-11-23 13:14:15.092246','CheckpointVerified','training','{"step":55,"took_s":0.009608098000171594,"blocking_s":0.00310212899785256,"bytes":318691,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(39,'7b85acd27321',4,'2026-11-23 13:14:15.268833','StopRequested','stopping','{"why":"a person''s stop"}');
INSERT INTO "events" VALUES(40,'7b85acd27321',4,'2026-11-23 13:14:16.568195','CheckpointVerified','stopping','{"step":59,"took_s":0.018064397998386994,"blocking_s":0.004689481000241358,"bytes":318691,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(41,'7b85acd27321',4,'2026-11-23 13:14:17.324909','longest_seen','','{"stage":"train","longest_s":{"data":0.007,"evaluation":0.244,"first_step":0.484,"save":0.011,"start":4.375,"step":0.395}}');
INSERT INTO "events" VALUES(42,'7b85acd27321',4,'2026-11-23 13:14:17.327116','AttemptSuspended','suspended','{}');
INSERT INTO "events" VALUES(43,'7b85acd27321',4,'2026-11-23 13:14:17.354282','forecast','','{"stage":"train","end_at":"2026-11-23T13:15:50Z","earliest_at":"2026-11-23T13:15:29Z","latest_at":"2026-11-23T13:16:17Z","steps_left":301,"sessions":1}');
INSERT INTO "events" VALUES(44,'7b85acd27321',5,'2026-11-23 13:14:19.242022','SessionOpened','starting','{}');
INSERT INTO "events" VALUES(45,'7b85acd27321',5,'2026-11-23 13:14:19.288309','launched','','{"attempt":"5.1","stage":"train","from":"disk","step":59,"step_on_disk":59,"lost_steps":0}');
INSERT INTO "events" VALUES(46,'7b85acd27321',5,'2026-11-23 13:14:22.272895','Attached','training','{"state_bytes":260904}');
INSERT INTO "events" VALUES(49,'7b85acd27321',5,'2026-11-23 13:14:25.274158','CheckpointDue','saving','{}');
INSERT INTO "events" VALUES(50,'7b85acd27321',5,'2026-11-23 13:14:26.444219','CheckpointVerified','training','{"step":74,"took_s":0.01900228999875253,"blocking_s":0.00771241300390102,"bytes":318888,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(51,'7b85acd27321',5,'2026-11-23 13:14:29.374620','SessionLost','cut off','{"found_by":18618,"why":"no rank left a word (the shim was killed)"}');
INSERT INTO "events" VALUES(52,'7b85acd27321',6,'2026-11-23 13:14:29.496960','SessionOpened','starting','{}');
INSERT INTO "events" VALUES(53,'7b85acd27321',6,'2026-11-23 13:14:29.531338','launched','','{"attempt":"6.1","stage":"train","from":"disk","step":74,"step_on_disk":74,"lost_steps":0}');
INSERT INTO "events" VALUES(54,'7b85acd27321',6,'2026-11-23 13:14:32.654247','Attached','training','{"state_bytes":260904}');
INSERT INTO "events" VALUES(57,'7b85acd27321',6,'2026-11-23 13:14:35.654242','CheckpointDue','saving','{}');
INSERT INTO "events" VALUES(58,'7b85acd27321',6,'2026-11-23 13:14:35.871632','CheckpointVerified','training','{"step":95,"took_s":0.019345396998687647,"blocking_s":0.005441296998469625,"bytes":319096,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(59,'7b85acd27321',6,'2026-11-23 13:14:38.868363','CheckpointDue','saving','{}');
INSERT INTO "events" VALUES(60,'7b85acd27321',6,'2026-11-23 13:14:39.227308','CheckpointVerified','training','{"step":127,"took_s":0.017550001000927296,"blocking_s":0.004179275994829368,"bytes":319304,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(61,'7b85acd27321',6,'2026-11-23 13:14:42.226083','CheckpointDue','saving','{}');
INSERT INTO "events" VALUES(62,'7b85acd27321',6,'2026-11-23 13:14:42.434205','CheckpointVerified','training','{"step":160,"took_s":0.017101201017794665,"blocking_s":0.003434993006521836,"bytes":319509,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(63,'7b85acd27321',6,'2026-11-23 13:14:42.635186','epoch','','{"stage":"train","epoch":27,"step":162,"metrics":{"dice":0.736682107701216,"dice_at_threshold":0.736682107701216,"epoch":24.0,"loss":0.301339328289032,"lr":0.00031248960159409273,"skipped":0.0,"threshold":0.5},"steps":88,"lasted_s":10.027,"first":true}');
INSERT INTO "events" VALUES(64,'7b85acd27321',6,'2026-11-23 13:14:45.436436','CheckpointDue','saving','{}');
INSERT INTO "events" VALUES(65,'7b85acd27321',6,'2026-11-23 13:14:45.776265','CheckpointVerified','training','{"step":192,"took_s":0.02515558999584755,"blocking_s":0.011169416997290682,"bytes":319626,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(66,'7b85acd27321',6,'2026-11-23 13:14:48.774155','CheckpointDue','saving','{}');
INSERT INTO "events" VALUES(67,'7b85acd27321',6,'2026-11-23 13:14:49.230223','CheckpointVerified','training','{"step":219,"took_s":0.01921247100108303,"blocking_s":0.00542344999848865,"bytes":319907,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(68,'7b85acd27321',6,'2026-11-23 13:14:52.227466','CheckpointDue','saving','{}');
INSERT INTO "events" VALUES(69,'7b85acd27321',6,'2026-11-23 13:14:52.679499','epoch','','{"stage":"train","epoch":40,"step":241,"metrics":{"dice":0.7973198089808611,"dice_at_threshold":0.7985261837566635,"epoch":39.0,"loss":0.2649136483669281,"lr":0.0018091124858777598,"skipped":0.0,"threshold":0.6},"steps":79,"lasted_s":10.044,"first":false}');
INSERT INTO "events" VALUES(70,'7b85acd27321',6,'2026-11-23 13:14:53.048040','CheckpointVerified','training','{"step":244,"took_s":0.019129687003442086,"blocking_s":0.0054156680052983575,"bytes":320116,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(71,'7b85acd27321',6,'2026-11-23 13:14:56.047229','CheckpointDue','saving','{}');
INSERT INTO "events" VALUES(72,'7b85acd27321',6,'2026-11-23 13:14:56.441808','CheckpointVerified','training','{"step":269,"took_s":0.012568575999466702,"blocking_s":0.00478258899966022,"bytes":320116,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(73,'7b85acd27321',6,'2026-11-23 13:14:59.436963','CheckpointDue','saving','{}');
INSERT INTO "events" VALUES(74,'7b85acd27321',6,'2026-11-23 13:14:59.813980','CheckpointVerified','training','{"step":292,"took_s":0.020333732005383354,"blocking_s":0.004879083004198037,"bytes":320322,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(75,'7b85acd27321',6,'2026-11-23 13:15:02.721602','forecast','','{"stage":"train","end_at":"2026-11-23T13:15:10Z","earliest_at":"2026-11-23T13:15:06Z","latest_at":"2026-11-23T13:15:20Z","steps_left":44,"sessions":0}');
INSERT INTO "events" VALUES(76,'7b85acd27321',6,'2026-11-23 13:15:02.810671','CheckpointDue','saving','{}');
INSERT INTO "events" VALUES(77,'7b85acd27321',6,'2026-11-23 13:15:03.198667','CheckpointVerified','training','{"step":320,"took_s":0.01894403699407121,"blocking_s":0.004856909996306058,"bytes":320526,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(78,'7b85acd27321',6,'2026-11-23 13:15:03.680771','epoch','','{"stage":"train","epoch":53,"step":323,"metrics":{"dice":0.8295502072164557,"dice_at_threshold":0.8295502072164557,"epoch":49.0,"loss":0.22680819034576416,"lr":0.0008700390708760587,"skipped":0.0,"threshold":0.5},"steps":82,"lasted_s":11.001,"first":false}');
INSERT INTO "events" VALUES(79,'7b85acd27321',6,'2026-11-23 13:15:06.196740','CheckpointDue','saving','{}');
INSERT INTO "events" VALUES(80,'7b85acd27321',6,'2026-11-23 13:15:06.688079','CheckpointVerified','training','{"step":344,"took_s":0.02158952899480937,"blocking_s":0.006329012998321559,"bytes":320726,"rescued":false,"final":false}');
INSERT INTO "events" VALUES(81,'7b85acd27321',6,'2026-11-23 13:15:09.251171','CheckpointVerified','training','{"step":360,"took_s":0.017197602006490342,"blocking_s":0.006160967008327134,"bytes":320926,"rescued":false,"final":true}');
INSERT INTO "events" VALUES(82,'7b85acd27321',6,'2026-11-23 13:15:10.799933','longest_seen','','{"stage":"train","longest_s":{"data":0.007,"evaluation":0.306,"first_step":0.543,"save":0.014,"start":4.375,"step":0.395}}');
INSERT INTO "events" VALUES(83,'7b85acd27321',6,'2026-11-23 13:15:10.802620','RunFinished','finished','{}');
CREATE TABLE pools (
	name VARCHAR(64) NOT NULL, 
	total_s DOUBLE NOT NULL, 
	resets TEXT NOT NULL, 
	reserve_s DOUBLE NOT NULL, 
	told_at DATETIME NOT NULL, 
	CONSTRAINT pk_pools PRIMARY KEY (name)
);
INSERT INTO "pools" VALUES('generic',360000.0,'Thursday 00:00 UTC',0.0,'2026-11-23 13:14:29.419726');
CREATE TABLE "resumes" (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	place VARCHAR(32) NOT NULL, 
	due_at DATETIME, 
	why TEXT NOT NULL, 
	tries INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	claimed_by VARCHAR(128) NOT NULL, 
	claimed_at DATETIME, 
	created_at DATETIME NOT NULL, 
	priority INTEGER DEFAULT '0' NOT NULL, 
	claimed_pid INTEGER, 
	claimed_ticks BIGINT, 
	claimed_boot VARCHAR(64) DEFAULT '' NOT NULL, 
	lease_until_at DATETIME, 
	last_error TEXT DEFAULT '' NOT NULL, 
	ranks INTEGER, 
	share BOOLEAN DEFAULT 0 NOT NULL, 
	turn_at DATETIME, 
	CONSTRAINT pk_resumes PRIMARY KEY (id), 
	CONSTRAINT fk_resumes_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
INSERT INTO "resumes" VALUES(1,'7b85acd27321','local','2026-11-23 13:13:29.558762','a person asked',1,'done','daemon','2026-11-23 13:13:30.400915','2026-11-23 13:13:29.584492',0,18232,3859072,'25714ea7-b846-4bb8-806b-734bc4c8e9fe',NULL,'',2,0,NULL);
INSERT INTO "resumes" VALUES(2,'7b85acd27321','local','2026-11-23 13:13:41.559658','no rank left a word (the shim was killed)',1,'done','daemon','2026-11-23 13:13:42.356082','2026-11-23 13:13:41.593323',0,18299,3860271,'25714ea7-b846-4bb8-806b-734bc4c8e9fe',NULL,'',2,0,'2026-11-23 13:13:30.374022');
INSERT INTO "resumes" VALUES(3,'7b85acd27321','local','2026-11-23 13:13:50.333367','no rank left a word (the shim was killed)',1,'done','daemon','2026-11-23 13:13:51.167160','2026-11-23 13:13:50.357198',0,18369,3861147,'25714ea7-b846-4bb8-806b-734bc4c8e9fe',NULL,'',2,0,'2026-11-23 13:13:42.349609');
INSERT INTO "resumes" VALUES(4,'7b85acd27321','local','2026-11-23 13:14:02.771757','no rank left a word (the shim was killed)',1,'done','daemon','2026-11-23 13:14:04.052930','2026-11-23 13:14:02.820323',0,18456,3862396,'25714ea7-b846-4bb8-806b-734bc4c8e9fe',NULL,'',2,0,'2026-11-23 13:13:51.158182');
INSERT INTO "resumes" VALUES(5,'7b85acd27321','local','2026-11-23 13:14:18.372307','a person asked',1,'done','daemon','2026-11-23 13:14:19.178081','2026-11-23 13:14:18.398805',0,18534,3863951,'25714ea7-b846-4bb8-806b-734bc4c8e9fe',NULL,'',2,0,'2026-11-23 13:14:04.041818');
INSERT INTO "resumes" VALUES(6,'7b85acd27321','local','2026-11-23 13:14:28.382362','no rank left a word (the shim was killed)',1,'done','daemon','2026-11-23 13:14:29.425359','2026-11-23 13:14:28.408728',0,18618,3864953,'367066fd-aa79-4aed-902e-ae6f65671766',NULL,'',2,0,'2026-11-23 13:14:19.152393');
CREATE TABLE rungs (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	session_id INTEGER, 
	plan_hash VARCHAR(64) NOT NULL, 
	stage VARCHAR(128) NOT NULL, 
	device VARCHAR(128) NOT NULL, 
	world INTEGER NOT NULL, 
	at DATETIME NOT NULL, 
	step INTEGER NOT NULL, 
	rung TEXT NOT NULL, 
	why TEXT NOT NULL, 
	up BOOLEAN NOT NULL, 
	changes_result BOOLEAN NOT NULL, 
	settings JSON NOT NULL, 
	CONSTRAINT pk_rungs PRIMARY KEY (id), 
	CONSTRAINT fk_rungs_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT fk_rungs_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE SET NULL
);
CREATE TABLE runs (
	id VARCHAR(32) NOT NULL, 
	name VARCHAR(128) NOT NULL, 
	number INTEGER NOT NULL, 
	folder TEXT NOT NULL, 
	workdir TEXT NOT NULL, 
	checkpoints TEXT NOT NULL, 
	"plan" TEXT NOT NULL, 
	overrides JSON NOT NULL, 
	plan_hash VARCHAR(64) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	why TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	finished_at DATETIME, pool VARCHAR(64) DEFAULT '' NOT NULL, 
	CONSTRAINT pk_runs PRIMARY KEY (id), 
	CONSTRAINT uq_runs_name UNIQUE (name, number)
);
INSERT INTO "runs" VALUES('7b85acd27321','test',1,'runs/test/1','/w','runs/test/1/checkpoints','name = "test"
[[stage]]
name = "train"
entry = "weathered:main"
ranks = 2
args = { inner = "workloads.surface_detection.train:main", data = "/data/surface_detection", num_workers = 0, epochs = 60, global_batch = 8, patch = 16, patches = 12, width = 4, valid_every = 5 }
[checkpoint]
every = "3000ms"
[session]
[resume]
sources = ["../input/**"]
[quota]
hours = 100
resets = "Thursday 00:00 UTC"
[notify]
urls = []
','[]','689fd5d42de41081','finished','','2026-11-23 13:13:29.575964','2026-11-23 13:15:10.831887','generic');
CREATE TABLE samples (
	id INTEGER NOT NULL, 
	session_id INTEGER NOT NULL, 
	at DATETIME NOT NULL, 
	span_s INTEGER NOT NULL, 
	"values" JSON NOT NULL, 
	CONSTRAINT pk_samples PRIMARY KEY (id), 
	CONSTRAINT fk_samples_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE CASCADE
);
CREATE TABLE sessions (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	number INTEGER NOT NULL, 
	place VARCHAR(32) NOT NULL, 
	phase VARCHAR(16) NOT NULL, 
	why TEXT NOT NULL, 
	boot_id VARCHAR(64) NOT NULL, 
	boot_wall_s DOUBLE, 
	wall_at DATETIME, 
	lead_s DOUBLE NOT NULL, 
	started_at DATETIME NOT NULL, 
	ended_at DATETIME, 
	supervisor_pid INTEGER, 
	supervisor_started_ticks BIGINT, 
	stage VARCHAR(128) NOT NULL, 
	first_step INTEGER NOT NULL, 
	epoch INTEGER NOT NULL, 
	epochs_total INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	steps_total INTEGER NOT NULL, 
	samples BIGINT NOT NULL, 
	step_s DOUBLE NOT NULL, 
	metrics JSON NOT NULL, 
	beat_at DATETIME, exactness JSON DEFAULT '{}' NOT NULL, wall_why VARCHAR(64) DEFAULT '' NOT NULL, fixed_wall_s DOUBLE, fixed_wall_why VARCHAR(64) DEFAULT '' NOT NULL, pool VARCHAR(64) DEFAULT '' NOT NULL, 
	CONSTRAINT pk_sessions PRIMARY KEY (id), 
	CONSTRAINT fk_sessions_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT uq_sessions_run_id UNIQUE (run_id, number)
);
INSERT INTO "sessions" VALUES(1,'7b85acd27321',1,'local','cut off','no rank left a word (the shim was killed)','25714ea7-b846-4bb8-806b-734bc4c8e9fe',610181.099419121,'2026-11-30 04:00:00.000001',1.21395532809341091253e+02,'2026-11-23 13:13:30.374022','2026-11-23 13:13:42.305522',18232,3859072,'train',0,3,60,23,360,184,3.54192415004945360124e-01,'{"skipped":0.0,"loss":0.6411962509155273,"lr":0.001838751232661451}','2026-11-23 13:13:39.932111','{}','the quota',NULL,'','generic');
INSERT INTO "sessions" VALUES(2,'7b85acd27321',2,'local','cut off','no rank left a word (the shim was killed)','25714ea7-b846-4bb8-806b-734bc4c8e9fe',610181.099420188,'2026-11-30 04:00:00.000002',1.21487567143534448633e+02,'2026-11-23 13:13:42.349609','2026-11-23 13:13:51.110471',18299,3860271,'train',24,4,60,28,360,224,3.77722665994951967149e-01,'{"loss":0.6288533210754395,"lr":0.0016692960410556786,"skipped":0.0}','2026-11-23 13:13:48.660576','{}','the quota',NULL,'','generic');
INSERT INTO "sessions" VALUES(3,'7b85acd27321',3,'local','cut off','no rank left a word (the shim was killed)','25714ea7-b846-4bb8-806b-734bc4c8e9fe',610181.099420643,'2026-11-30 04:00:00.000001',1.2111464353133219163e+02,'2026-11-23 13:13:51.158182','2026-11-23 13:14:03.979803',18369,3861147,'train',16,8,60,48,360,384,1.5895041400654008612e-01,'{"loss":0.6072084307670593,"lr":0.0007418103644200306,"skipped":0.0,"epoch":4.0,"dice":0.3024967459472252,"threshold":0.6,"dice_at_threshold":0.5556151695704967}','2026-11-23 13:14:01.646242','{}','the quota',NULL,'','generic');
INSERT INTO "sessions" VALUES(4,'7b85acd27321',4,'local','suspended','a person''s stop','25714ea7-b846-4bb8-806b-734bc4c8e9fe',610181.099419794,'2026-11-30 03:59:59.999999',1.21519796009848846552e+02,'2026-11-23 13:14:04.041818','2026-11-23 13:14:17.326100',18456,3862396,'train',34,9,60,59,360,472,3.7424981699587078765e-01,'{"loss":0.5789777040481567,"lr":0.0002577267469353447,"skipped":0.0,"epoch":4.0,"dice":0.3024967459472252,"threshold":0.6,"dice_at_threshold":0.5556151695704967}','2026-11-23 13:14:16.562259','{}','the quota',NULL,'','generic');
INSERT INTO "sessions" VALUES(5,'7b85acd27321',5,'local','cut off','no rank left a word (the shim was killed)','25714ea7-b846-4bb8-806b-734bc4c8e9fe',610181.099418845,'2026-11-30 04:00:00.000000',1.21064497347986545607e+02,'2026-11-23 13:14:19.152393','2026-11-23 13:14:29.373370',18534,3863951,'train',59,13,60,79,360,632,1.37014086001727264374e-01,'{"dice":0.4575784357048166,"dice_at_threshold":0.5468516928083894,"epoch":9.0,"loss":0.5193310976028442,"lr":0.0019832632801101728,"skipped":0.0,"threshold":0.6}','2026-11-23 13:14:27.230827','{}','the quota',NULL,'','generic');
INSERT INTO "sessions" VALUES(6,'7b85acd27321',6,'local','finished','','367066fd-aa79-4aed-902e-ae6f65671766',6.10181099421285092843e+05,'2026-11-30 04:00:00.000002',120.0,'2026-11-23 13:14:29.417803','2026-11-23 13:15:10.801467',18618,3864953,'train',74,60,60,360,360,2880,1.35690162998798768967e-01,'{"dice":0.841202698067909,"dice_at_threshold":0.841202698067909,"epoch":59.0,"loss":0.19839638471603394,"lr":0.0004236433825577848,"skipped":0.0,"threshold":0.5}','2026-11-23 13:15:09.231878','{}','the quota',NULL,'','generic');
CREATE TABLE stages (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	position INTEGER NOT NULL, 
	name VARCHAR(128) NOT NULL, 
	finished_at DATETIME, 
	note TEXT NOT NULL, 
	CONSTRAINT pk_stages PRIMARY KEY (id), 
	CONSTRAINT fk_stages_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT uq_stages_run_id UNIQUE (run_id, name)
);
INSERT INTO "stages" VALUES(1,'7b85acd27321',0,'train','2026-11-23 13:15:10.798222','');
CREATE INDEX ix_attempts_reached ON attempts (session_id, stage, last_step);
CREATE INDEX ix_charges_from_at ON charges (from_at);
CREATE INDEX ix_charges_pool_from_at ON charges (pool, from_at);
CREATE INDEX ix_charges_session_id ON charges (session_id);
CREATE INDEX ix_checkpoints_run_id ON checkpoints (run_id);
CREATE INDEX ix_checkpoints_session_id ON checkpoints (session_id);
CREATE INDEX ix_checkpoints_standing ON checkpoints (run_id, state, stage, step);
CREATE INDEX ix_events_run_id_id ON events (run_id, id);
CREATE INDEX ix_events_run_id_kind ON events (run_id, kind, id);
CREATE INDEX ix_events_session_id_kind ON events (session_id, kind, id);
CREATE INDEX ix_resumes_due_at ON resumes (due_at);
CREATE INDEX ix_resumes_run_id ON resumes (run_id);
CREATE INDEX ix_resumes_run_id_state ON resumes (run_id, state);
CREATE INDEX ix_resumes_share_state_due_at ON resumes (share, state, due_at);
CREATE INDEX ix_resumes_state ON resumes (state);
CREATE INDEX ix_resumes_state_due_at ON resumes (state, due_at);
CREATE INDEX ix_rungs_plan ON rungs (plan_hash, stage, device, world);
CREATE INDEX ix_rungs_run_id_id ON rungs (run_id, id);
CREATE INDEX ix_runs_created_at ON runs (created_at);
CREATE INDEX ix_runs_state_created_at ON runs (state, created_at);
CREATE INDEX ix_samples_session_span_at ON samples (session_id, span_s, at);
CREATE INDEX ix_sessions_phase ON sessions (phase);
CREATE UNIQUE INDEX uq_resumes_waiting ON resumes (run_id) WHERE state IN ('due', 'claimed');
COMMIT;
